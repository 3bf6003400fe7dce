"""A file that another command writes first is not replaced without --overwrite, whoever writes it."""

import os

import pytest
import timm

import isomorph as iso
from isomorph.checkpoints import files
from isomorph.checkpoints.paths import move_into_place
from isomorph.cli import main

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

    def another_command_writes(partial, path, new=False):
        if not path.exists() and "OUT" in str(path):
            path.write_text("theirs")
            written.append(path)
        move_into_place(partial, path, new)

    monkeypatch.chdir(tmp_path)
    iso.save(timm.create_model("cifar_resnet20"), "m.safetensors")
    written = []
    monkeypatch.setattr(files, "move_into_place", another_command_writes)
    if not links:
        monkeypatch.setattr(os, "link", disk_without_links)
    run = [command, "m.safetensors", *COMMANDS[command]]
    for more, status in ([], 2), (["--overwrite"], 0):
        with pytest.raises(SystemExit) as ended:
            main([*run, *more])
        assert ended.value.code == status
        assert (written[0].read_bytes() == b"theirs") is bool(status)
    assert (
        f"{written[0].name} exists now: another command wrote it; give --overwrite"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.rglob("*.partial"))
