"""A file that another command writes first is not replaced without --overwrite, whoever writes it."""

import os

import pytest
import timm
import torch

import isomorph as iso
from isomorph.checkpoints import files, paths
from isomorph.cli import main
from isomorph.tasks.diffusion.sampling import write_folder
from refusals import refused

COMMANDS = {
    "recast": ["--where", "layer3.2.conv2", "--out", "OUT.safetensors"],
    "evaluate": ["--data", "digits", "--max-images", "4", "--no-cost", "--per-class", "OUT.csv"],
    "push": ["me/net", "--out", "OUT"],
}


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
def test_of_two_commands_one_writes(command, links, tmp_path, monkeypatch, capsys):
    def disk_without_links(*names):
        raise PermissionError

    def another_command_writes(path):
        if path.exists() or "OUT" not in str(path):
            return
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
        written.append(path)

    monkeypatch.chdir(tmp_path)
    iso.save(timm.create_model("cifar_resnet20"), "m.safetensors")
    written = []
    monkeypatch.setattr(files, "_remove_abandoned", another_command_writes)
    if not links:
        monkeypatch.setattr(os, "link", disk_without_links)
    run = [command, "m.safetensors", *COMMANDS[command]]
    for more, status in ([], 2), (["--overwrite"], 0):
        with pytest.raises(SystemExit) as ended:
            main([*run, *more])
        assert ended.value.code == status
        assert (written[0].read_bytes() == b"theirs") is bool(status)
    assert f"{written[0].name} exists now: another command wrote it; give --overwrite" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.partial"))


def test_of_two_folders_one_stays(tmp_path):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    paths.require_new(tmp_path / "out", False, "--out")
    write_folder(images[:1], tmp_path / "out")
    refused("out exists now: another command wrote it", write_folder, images, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 1
    paths.require_new(tmp_path / "out", True, "--out")
    write_folder(images, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 2
