"""The demo: its results, its page, and the commands that it suggests."""

import shlex
from pathlib import Path

import pytest
import torch

from isomorph.lab.demo import next_commands, run_demo, write_demo_page

SMALL = ["epochs=1", "data.fraction=0.03", "optim.warmup_epochs=0", "data.test_images=30"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    threads = torch.get_num_threads()
    demo = run_demo(folder / "models", show=False, overrides=SMALL)
    assert torch.get_num_threads() == threads
    write_demo_page(demo, folder / "demo.html")
    return demo, folder


def test_the_recast_is_equal_on_every_test_image(found):
    demo, _ = found
    assert demo.report.passed
    assert demo.agreeing == len(demo.images) == 30
    assert "30 of 30 test images get the same class" in demo.equality
    assert demo.weight > 0.99
    assert len(demo.report.targets) == 6


def test_its_page_loads_nothing_and_has_its_command(found):
    path = found[1] / "demo.html"
    page = path.read_text()
    assert f'<pre id="command" tabindex="0">isomorph demo --out {path}</pre>' in page
    assert page.count('data-chart="') >= 1  # constant values are a line of text
    assert page.count('data-viewer="') == 2
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "src=" not in page


def test_its_models_and_the_suggested_commands_work(found, monkeypatch, capsys):
    from isomorph.cli import main

    _, folder = found
    monkeypatch.chdir(folder)
    commands = [command for _, command in next_commands(Path("models"))]
    assert len(commands) == 3
    short = {
        "train": ["--epochs", "1", "--data.fraction", "0.05", "--data.test_images", "20"],
        "verify": ["--batch", "4"],
    }
    for command in commands:
        words = shlex.split(command)
        arguments = words[
            next(i for i, word in enumerate(words) if word in ("verify", "analyze", "train")) :
        ]
        with pytest.raises(SystemExit) as done:
            main([*arguments, *short.get(arguments[0], [])])
        assert not done.value.code
    assert "equal within" in capsys.readouterr().out
    assert (folder / "isomorph-analysis.html").is_file()
    assert (folder / "runs/digits_annealed/model.safetensors").is_file()
