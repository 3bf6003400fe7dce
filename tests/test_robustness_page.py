"""The page and the options of `isomorph robustness`: a model next to its baseline, on the cells that both have."""

import json
import re

import pytest
import timm
import torch

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.lab.evaluation.robustness.cells import SavedResult
from isomorph.lab.evaluation.robustness.scores import robustness_summary
from isomorph.lab.report.robustness_page import write_robustness


def shown(path):
    """The first sentence of a page, the rows of its first table, and its charts by title."""
    page = path.read_text()
    lead = re.search(r'<p class="lead">(.*?)</p>', page)[1]
    table = page.partition("<table")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in table.split("<tr")]
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    return lead, [row for row in rows if row], {each["title"]: each for each in data["charts"]}


def cells_of(top1):
    cells = {}
    for (corruption, severity), value in top1.items():
        cells[corruption, severity] = {
            "corruption": corruption,
            "severity": severity,
            "top1": value,
            "images": 10,
        }
    return cells


def result_of(name, clean, top1):
    cells = cells_of(top1)
    identity = dict(model=name, pictures="own crop", constants="published", seed=0, images=10)
    clean = {"top1": clean, "images": 10}
    summary = robustness_summary(cells, clean, imagenet=False)
    clean |= {"corruption": "clean", "severity": 0}
    return {**identity, "clean": clean, "cells": list(cells.values()), **summary}


@pytest.mark.parametrize(("name", "first"), [("base", "base"), ("net", "net (baseline)")])
def test_a_page_compares_the_common_cells_and_names_the_baseline_first(name, first, tmp_path):
    ours = {("fog", 1): 60.0, ("fog", 2): 50.0, ("snow", 1): 20.0}
    base = {("clean", 0): 70.0, ("snow", 1): 30.0, ("fog", 1): 40.0, ("fog", 3): 1.0}
    page = tmp_path / "page.html"
    saved = SavedResult({"model": name}, cells_of(base), 0)
    assert write_robustness(page, result_of("net", 80.0, ours), saved) == page.stat().st_size
    lead, rows, charts = shown(page)
    assert lead == (
        f"On corrupted images net reaches 40.00 % top-1, 5.00 points above {first}: "
        "+20.00 under fog, -10.00 under snow."
    )
    assert rows[1:] == [[first, "70.00", "2", "35.00"], ["net", "80.00", "2", "40.00"]]
    assert charts[f"Points gained (red) or lost (blue): net minus {first}"]["table"][1:] == [
        ["snow", "-10"],
        ["fog", "20"],
    ]


def test_the_command_writes_the_page_next_to_its_baseline(tmp_path):
    base = timm.create_model("cifar_resnet20", num_classes=10)
    torch.nn.init.normal_(base.linear.weight)
    source = iso.data.open_source("digits", "test")
    fog = dict(corruptions=["fog"], severities=[1], limit=8)
    theirs = iso.robustness(base, source, **fog, out=tmp_path / "base.jsonl")
    torch.nn.init.normal_(base.linear.weight)
    iso.save(base, tmp_path / "net.safetensors")
    line = "robustness net.safetensors --data digits --max-images 8 --corruption fog --severity 1"
    options = ["--baseline", "base.jsonl", "--extra", "--page", "page.html", "--json"]
    run = isomorph(*line.split(), *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    extra = [*iso.data.EXTRA_CORRUPTIONS]
    assert [cell["corruption"] for cell in found["cells"]] == ["fog", *extra]
    assert theirs["cells"][0]["top1"] != found["cells"][0]["top1"]
    gained = found["cells"][0]["top1"] - theirs["cells"][0]["top1"]
    assert found["against"]["points"] == pytest.approx(gained)
    _, rows, _ = shown(tmp_path / "page.html")
    assert [row[0] for row in rows[1:]] == [theirs["model"], "net.safetensors"]
    options = ["--baseline", "base.jsonl", "--seed", "1"]
    said = refusal(isomorph(*line.split(), *options, folder=tmp_path))
    assert "base.jsonl was measured on other images: seed 0, here 1" in said
