"""The guide for one's own model and images, as written: a ResNet-18 of three classes, on crops of photographs."""

import json
from pathlib import Path

import pytest
import timm
import torch

import isomorph as iso
from isomorph.models.input_sizes import training_config
from small_images import write_crops
from test_docs_code import blocks_of, run_shell

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "your-own-model.md"
CLASSES = ("date", "fig", "hazelnut")
"""As the guide names its classes."""
EACH = 4
"""Images of each class."""


def train_elsewhere(photos, path):
    """A ResNet-18 with a training loop that knows nothing of isomorph."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=3)
    source = iso.data.open_source(photos, "test")
    loader = iso.data.eval_loader(source, training_config(model, (64, 64)), batch_size=len(source))
    images, labels = next(iter(loader))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.save(model.state_dict(), path)


@pytest.mark.slow
def test_every_block_of_the_guide(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_crops(tmp_path / "photos", CLASSES, EACH)
    train_elsewhere(tmp_path / "photos", tmp_path / "my_resnet18.pth")
    blocks = blocks_of(GUIDE)
    assert [language for language, _ in blocks].count("bash") == 8
    for language, text in blocks:
        if language == "bash":
            run_shell(text, tmp_path)
        else:
            exec(compile(text, str(GUIDE), "exec"), {"__name__": "__main__"})
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {
        *(
            "photos",
            "my_resnet18.pth",
            "my_tcnn.safetensors",
            "runs",
            "analysis.html",
            "comparison.html",
        ),
        "net.safetensors",
    }
    metrics = json.loads((tmp_path / "runs" / "tcnn" / "log.jsonl").read_text().splitlines()[-1])
    assert metrics["images"] == len(iso.data.open_source("photos", "test", test_fraction=0.25))
    assert "'images': 12" in capsys.readouterr().out
