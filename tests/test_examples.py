"""The scripts and notebooks in examples/ run as they are, without arguments, and stay short."""

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from command_line import isomorph
from isomorph.surgery.rule import RULES
from requirements import missing

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LAST_LINES = {
    "recast_a_cnn.py": r"4\. Saved, and loaded again: [\d.]+ % top-1",
    "refine_a_dinov2.py": r"4\. Similarity between the heads",
    "robustness_page.py": r"\d+ KB; open it in a browser",
    "train_wide_ship_thin.py": r"Linear\(in_features=",
    "your_own_rule.py": r"4\. Saved and loaded again, rule included: True",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs_without_arguments(script, tmp_path, monkeypatch, capsys):
    if script.name == "robustness_page.py" and not find_spec("imagecorruptions"):
        missing("needs imagecorruptions: pip install 'isomorph[corruptions]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with patch.dict(RULES):  # an example registers a rule of its own
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(LAST_LINES[script.name], printed.strip().splitlines()[-1]), printed
    for number in range(1, 4):
        assert re.search(rf"(?m)^{number}\.", printed), f"step {number} is not printed"


WITH = {
    "lightning_module": ("equal: True", "lightning"),
    "onnxruntime_session": (r"\d+ KB for [\d,]+ trained parameters", "onnxruntime"),
    "openvino_model": ("equal: True", "openvino"),
    "peft_lora": ("MultiheadAttention True", "peft"),
    "segmentation_models": ("equal: True", "segmentation_models_pytorch"),
    "torchvision_detector": ("attention is used: True", "torchvision"),
    "transformers_port": (r"equal: True in float64 .*", "transformers"),
    "transformers_trainer": (
        r"gates moved: True \(by up to 0\.\d+ of the attention\)",
        "accelerate",
    ),
}
"""The last line that an example with another library prints, and the package that it needs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH)
def test_runs_with_another_library(name, tmp_path):
    last, package = WITH[name]
    if not find_spec(package):
        missing(f"needs {package}: pip install 'isomorph[with,export]'")
    script = EXAMPLES / "with" / f"{name}.py"
    run = isomorph(script, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(last, run.stdout.strip().splitlines()[-1]), run.stdout
    assert "equal: False" not in run.stdout


def test_every_example_with_another_library_is_short_and_tested():
    texts = {path.stem: path.read_text() for path in (EXAMPLES / "with").glob("*.py")}
    assert set(texts) == set(WITH)
    for name, text in texts.items():
        assert len(text.splitlines()) <= 60, name
        assert f"python examples/with/{name}.py\n" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_is_short_and_says_how_to_run_it(script):
    text = script.read_text()
    assert len(text.splitlines()) < 80
    assert f"python examples/{script.name} " in text


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_installs_what_it_needs_and_runs_from_top_to_bottom(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads(path.read_text())
    names = {"__name__": "__main__"}
    assert notebook["nbformat"] == 4
    assert notebook["nbformat_minor"] == 5
    assert not any(cell.get("outputs") for cell in notebook["cells"]), (
        "store notebooks without outputs"
    )
    install, *cells = [
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
    ]
    assert install.startswith(("%pip install -q isomorph", '%pip install -q "isomorph['))
    assert ("digits" in str(cells)) == ("demo" in install)
    assert ("matplotlib" in str(cells)) == ("matplotlib" in install)
    for number, code in enumerate(cells, start=2):
        exec(compile(code, f"{path.name}, code cell {number}", "exec"), names)
    assert "True" in capsys.readouterr().out.splitlines()[-1]
