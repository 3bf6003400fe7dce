"""Run the first Python block of a page: python docs_build/first_block.py README.md"""

import re
import sys
from pathlib import Path

exec(
    re.search(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL)[1]
)
