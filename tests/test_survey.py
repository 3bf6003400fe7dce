"""iso.survey: exact rules change nothing, soft ones something; it resumes; what it advises follows from its numbers."""

import copy
import json

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.report.survey_page import alone_table, survey_lead, survey_sections
from isomorph.suites.survey import advice_lines, conv_rules, most_layers, softest_alone
from isomorph.suites.survey import run as survey_run

LAYERS = ["layer3.2.conv1", "layer3.2.conv2"]
RULES = [iso.ConvToGPSA(), iso.ConvToGPSA(locality=2.0, gate=3.0), iso.ConvToGPSA(locality=0.3, gate=-1.0)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model("cifar_resnet20", num_classes=10).eval()


@pytest.fixture(scope="module")
def loader(model):
    source = iso.data.open_source("digits", "test").subset(range(24))
    return iso.data.eval_loader(source, timm.data.resolve_data_config(model=model), 12)


@pytest.fixture(scope="module")
def result(model, loader):
    return iso.survey(model, loader, RULES, where="layer3.2.*", seconds=0)


def cells(result, kind):
    return {
        (cell["rule"], len(cell["layers"]), cell["layers"][0]): cell for cell in result["cells"] if cell["kind"] == kind
    }


def test_exact_rule_changes_nothing_and_softer_ones_change_more(result):
    for layer in LAYERS:
        deviations = [cells(result, "alone")[label, 1, layer]["deviation"] for label in result["rules"]]
        assert deviations[0] < 1e-5
        assert deviations[0] < deviations[1] < deviations[2]
    exact = cells(result, "alone")["exact", 1, LAYERS[0]]
    assert exact["top1_loss"] == exact["changed"] == exact["top1_error"] == 0
    assert exact["kl"] < 1e-8


def test_values_are_those_of_the_recast_model(model, loader, result):
    torch.manual_seed(0)
    soft = iso.recast(model, RULES[2], where="layer3.2.conv2")
    images = torch.cat([images for images, _ in loader])
    with torch.no_grad():
        old, new = model(images), soft(images)
    cell = cells(result, "alone")[result["rules"][2], 1, "layer3.2.conv2"]
    assert cell["top1"] == pytest.approx(iso.evaluate(soft, loader)["top1"])
    assert cell["changed"] == pytest.approx(100 * (old.argmax(1) != new.argmax(1)).float().mean().item())
    kl = torch.nn.functional.kl_div(new.log_softmax(1), old.log_softmax(1), reduction="batchmean", log_target=True)
    assert cell["kl"] == pytest.approx(kl.item(), rel=1e-3)


def test_similarity_is_as_sharp_as_each_layer_needs(model, loader):
    layer, batches = "conv1", list(loader)
    rules = [iso.ConvToGPSA(content="similar", gate=0.0, sharpness=sharpness) for sharpness in (None, 1.0)]
    found = cells(iso.survey(model, loader, rules, where=layer, seconds=0), "alone")
    recasts = [iso.recast(model, rule, where=layer) for rule in rules]
    recasts[0] = iso.fit_sharpness(recasts[0], batches[0][0])
    assert recasts[0].get_submodule(layer).sharpness.item() != pytest.approx(10, rel=0.1)
    for cell, soft in zip(found.values(), recasts, strict=True):
        assert cell["deviation"] > 1e-4
        assert cell["top1"] == pytest.approx(iso.evaluate(soft, loader)["top1"])
        old, new = (torch.cat([m.eval()(images) for images, _ in batches]).double() for m in (model, soft))
        deviation = (new - old).square().mean() / (old - old.mean(1, keepdim=True)).square().mean()
        assert cell["deviation"] == pytest.approx(deviation.sqrt().item(), rel=1e-4)


def test_half_precision(model, loader):
    half = copy.deepcopy(model).half()
    assert iso.survey(half, loader, RULES[:1], where="layer3.2.conv2", seconds=0)["cells"]
    assert 0 <= iso.evaluate(half, loader)["top1"] <= 100


def test_last_layers_are_added_from_the_back(result):
    together = [cell["layers"] for cell in result["cells"] if cell["kind"] == "last" and cell["rule"] == "exact"]
    assert together == [LAYERS[1:], LAYERS]
    alone, last = cells(result, "alone"), cells(result, "last")
    key = (result["rules"][1], 1, LAYERS[1])
    assert {k: v for k, v in alone[key].items() if k != "kind"} == {k: v for k, v in last[key].items() if k != "kind"}


def test_global_generator_is_left_as_it_was_and_results_repeat(model, loader, result):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = iso.survey(model, loader, RULES, where="layer3.2.*", seconds=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert again == result


def test_costs_name_every_layer_and_form_once(result):
    assert [(row["layer"], row["form"]) for row in result["costs"]] == [
        (layer, form) for layer in LAYERS for form in ("", "exact")
    ]
    conv = next(row for row in result["costs"] if not row["form"])
    assert conv["macs"] == 64 * 64 * 9 * 8 * 8
    assert all("time" not in row for row in result["costs"])


def test_time_is_relative_to_the_layer_itself(model, loader):
    rows = iso.survey(model, loader, RULES[:1], where=LAYERS[1], seconds=1e-3)["costs"]
    assert rows[0]["time"] == 1
    assert rows[1]["time"] > 0


def test_resumes_after_a_cut_line(tmp_path, model, loader, result, monkeypatch):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    iso.survey(model, loader, RULES, where="layer3.2.*", seconds=0, out=whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    measured = []
    compare = survey_run.Reference.compare
    monkeypatch.setattr(survey_run.Reference, "compare", lambda *args: measured.append(1) or compare(*args))
    assert iso.survey(model, loader, RULES, where="layer3.2.*", seconds=0, out=part) == result
    known = sum(1 for cell in result["cells"] if cell["kind"] == "last" and len(cell["layers"]) == 1)
    assert len(measured) == len(result["cells"]) - 4 - known
    assert part.read_bytes() == whole.read_bytes()


def test_results_of_another_model_or_of_something_else_are_rejected(tmp_path, model, loader):
    out = tmp_path / "s.jsonl"
    iso.survey(model, loader, RULES[:1], where=LAYERS[1], seconds=0, out=out)
    with pytest.raises(iso.UserError, match="survey of other rules"):
        iso.survey(model, loader, RULES[:2], where=LAYERS[1], seconds=0, out=out)
    torch.manual_seed(1)
    with pytest.raises(iso.UserError, match="survey of another model"):
        iso.survey(timm.create_model("cifar_resnet20"), loader, RULES[:1], where=LAYERS[1], seconds=0, out=out)
    out.write_text("hello\n")
    with pytest.raises(iso.UserError, match="not a result file of isomorph survey"):
        iso.survey(model, loader, RULES[:1], where=LAYERS[1], seconds=0, out=out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "linear"}, "no layer to survey for where='linear'"),
        ({"rules": []}, "no rule to survey"),
        ({"rules": [RULES[0], RULES[0]]}, "two rules of the survey are equal"),
        ({"loss": -1}, "must be at least 0"),
    ],
)
def test_wrong_arguments(model, loader, options, message):
    with pytest.raises(iso.UserError, match=message):
        iso.survey(model, loader, **{"rules": RULES, "seconds": 0, **options})


def test_rejected_layers_are_named_with_their_reason(loader):
    dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), dilated, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    result = iso.survey(net, loader, RULES[:1], seconds=0)
    assert [row["name"] for row in result["layers"]] == ["0"]
    assert "dilation" in result["rejected"]["1"]


def test_images_without_labels_are_compared_by_their_predictions(model, loader):
    unlabelled = [(images, torch.full_like(labels, -1)) for images, labels in loader]
    result = iso.survey(model, unlabelled, RULES[2:], where="layer3.2.conv2", seconds=0)
    assert result["top1"] is None
    assert "top1" not in result["cells"][0]
    assert "% of the predictions" in advice_lines(result)[0]
    assert len(survey_sections(result)[1].charts) == 1


def made_up(losses, together):
    """The result of a survey with these losses: {layer: loss by rule} alone, {rule: losses of the last 1, 2, ...}."""
    layers, labels = list(losses), list(together)
    cells = [
        {"kind": "alone", "rule": label, "layers": [layer], "top1_loss": loss, "changed": 0.0}
        for layer in layers
        for label, loss in zip(labels, losses[layer], strict=True)
    ]
    cells += [
        {"kind": "last", "rule": label, "layers": layers[-n:], "top1_loss": loss, "changed": 0.0}
        for label in labels
        for n, loss in enumerate(together[label], 1)
    ]
    rows = [{"name": layer} for layer in layers]
    return {"cells": cells, "layers": rows, "rules": labels, "loss": 1.0, "top1": 80.0, "images": 100, "rejected": {}}


def test_advice_stops_at_the_first_loss_above_the_limit():
    result = made_up(
        {"a": [2.0, 0.1], "b": [0.5, 3.0], "c": [0.0, 0.9]}, {"hard": [0.0, 0.4, 1.2], "soft": [0.9, 3.0, 0.2]}
    )
    assert most_layers(result["cells"], ["hard", "soft"], 1.0) == {"hard": 2, "soft": 1}
    assert softest_alone(result["cells"], ["a", "b", "c"], ["hard", "soft"], 1.0) == {"b": "hard", "c": "soft"}
    assert advice_lines(result) == [
        "hard: the last 2 layers (b to c) of 3 for at most 1 point of top-1",
        "soft: the last layer (c) of 3 for at most 1 point of top-1",
        "even alone, and at hard, these lose more: a",
    ]
    assert survey_lead(result).endswith(
        "Of 3 layers, the last 2 layers can be recast at hard for at most 1 point of top-1, and the last layer at soft."
    )
    assert [row[:2] for row in alone_table(result)[1:]] == [["a", "none"], ["b", "hard"], ["c", "soft"]]


def test_layers_are_no_longer_added_after_a_large_loss(model, loader):
    far = iso.survey(model, loader, [iso.ConvToGPSA(locality=0.05, gate=-9.0)], where="layer3.*", seconds=0, loss=100)
    last = [cell for cell in far["cells"] if cell["kind"] == "last"]
    lost = [cell["top1_loss"] for cell in last]
    assert all(loss <= survey_run.MAX_LOSS for loss in lost[:-1])
    assert len(last) == 6 or lost[-1] > survey_run.MAX_LOSS


def test_default_rules_run_from_hard_to_soft():
    rules = conv_rules()
    localities = [rule.locality for rule in rules]
    assert localities == sorted(localities, reverse=True)
    assert (rules[-1].locality, rules[-1].gate) == (1.0, 1.0)


def test_command_writes_a_page(tmp_path):
    options = [
        "--no-pretrained",
        "--data",
        "digits",
        "--where",
        "layer3.2.conv2",
        "--max-images",
        "8",
        "--seconds",
        "0",
    ]
    options += ["--setting", "5", "6", "--setting", "1", "1", "--results", "s.jsonl"]
    run = isomorph("survey", "cifar_resnet20", *options, "--json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "isomorph-survey.html").read_text()
    assert json.loads(run.stdout)["rules"] == ["locality 5, gate 6", "locality 1, gate 1"]
    assert "Each layer alone" in page
    given = [*options, "--out", "isomorph-survey.html"]
    assert "exists; give --overwrite" in refusal(isomorph("survey", "cifar_resnet20", *given, folder=tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--setting", "0", "1"], "locality"),
        (["--where", "linear"], "no layer to survey"),
        (["--where", "layer9.*"], "no layer to survey"),
        (["--loss", "-1"], "--loss and --seconds"),
        (["--max-images", "0"], "--max-images 0 must be at least 1"),
        (["--data", "nosuch"], "nosuch"),
        (["--classes", "3"], "the model has 10 classes, the data has 3"),
    ],
)
def test_command_explains_wrong_values(tmp_path, options, message):
    given = {"--data": ["digits"], "--max-images": ["4"], options[0]: options[1:]}
    words = [word for option, values in given.items() for word in (option, *values)]
    run = isomorph("survey", "cifar_resnet20", "--no-pretrained", *words, folder=tmp_path)
    assert message in refusal(run)
    assert not list(tmp_path.iterdir())
