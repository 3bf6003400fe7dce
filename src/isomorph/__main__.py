"""`python -m isomorph` is the command line."""

from isomorph.cli import main

main()
