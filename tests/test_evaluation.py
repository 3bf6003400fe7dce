"""Metrics against closed forms, cost against counting by hand, and the published accuracies on real images."""

import math

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torch import nn

import isomorph as iso
from isomorph.analysis.cost import count_macs
from isomorph.analysis.speed import throughput
from isomorph.lab.evaluation.accuracy import (
    MultiLabelCounts,
    PredictionCounts,
    evaluate,
    sum_counts,
)
from refusals import refused


class Says(nn.Module):
    """Gives the logits it was handed, row by row of the input's first pixel."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x):
        return self.logits[x[:, 0].long()]


def slow_metrics(logits, labels):
    """Image by image, in float64, as the definitions read."""
    right = 0
    near = 0
    nll = 0.0
    bins = {}
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        p = (row - row.max()).exp() / (row - row.max()).exp().sum()
        ranked = sorted(range(len(row)), key=lambda c: -row[c])
        right = right + (ranked[0] == label)
        near = near + (label in ranked[:5])
        nll = nll - p[label].log().item()
        place = math.ceil(p.max().item() * 15)
        bins.setdefault(place, []).append((p.max().item(), ranked[0] == label))
    n = len(labels)
    gaps = [
        abs(sum(hit for _, hit in found) - sum(confidence for confidence, _ in found))
        for found in bins.values()
    ]
    top5 = {"top5": 100 * near / n} if len(row) > 5 else {}
    return {
        "top1": 100 * right / n,
        **top5,
        "nll": nll / n,
        "ece": 100 * sum(gaps) / n,
        "images": n,
    }


@pytest.mark.parametrize(("classes", "scale"), [(3, 1.0), (12, 4.0), (40, 30.0)])
def test_streamed_metrics_against_a_slow_reference(classes, scale):
    """In uneven batches, some labels missing, added up over processes: and torchmetrics agrees on the calibration."""
    from torchmetrics.functional.classification import (
        multiclass_accuracy,
        multiclass_calibration_error,
    )

    logits = scale * torch.randn(300, classes)
    labels = torch.randint(classes, (300,))
    labels[::7] = -1
    tallies = []
    for part in (slice(0, 110), slice(110, 111), slice(111, 300)):
        tallies.append(PredictionCounts(classes))
        for batch, answers in zip(logits[part].split(64), labels[part].split(64), strict=True):
            tallies[-1].add(batch, answers)
    real = labels >= 0
    found = sum_counts(tallies).metrics()
    expected = slow_metrics(logits[real], labels[real])
    assert found == pytest.approx(expected, rel=1e-5)
    theirs = multiclass_calibration_error(
        logits[real].softmax(-1), labels[real], classes, n_bins=15
    )
    if logits.softmax(-1).max() < 1:  # they give a confidence of exactly 1 a bin of its own
        assert found["ece"] == pytest.approx(100 * theirs.item(), rel=1e-5)
    whole = sum_counts(tallies)
    per_class = multiclass_accuracy(logits[real], labels[real], classes, average=None)
    assert torch.allclose(whole.correct / whole.total, per_class)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_labels_of_small_types_count(dtype):
    found = PredictionCounts(2)
    found.add(torch.eye(2), torch.tensor([0, 1], dtype=dtype))
    assert found.metrics()["top1"] == 100


def test_what_is_kept_does_not_grow_with_the_images():
    found = PredictionCounts(1000)
    for _ in range(3):
        found.add(torch.randn(50, 1000), torch.randint(1000, (50,)))
        assert sum(kept.numel() for kept in vars(found).values()) == 3 * 1000 + 3 * 15 + 1


def test_several_right_labels_or_none():
    found = MultiLabelCounts()
    sure = torch.eye(4)
    found.add(sure, torch.tensor([[0, -1, -1], [2, 1, 3], [-1, -1, -1], [0, 1, -1]]))
    assert found.metrics() == {"top1": pytest.approx(100 * 2 / 3), "images": 3}
    refused("no image has a label", lambda: MultiLabelCounts().metrics())
    refused("no image has a label", lambda: PredictionCounts(3).metrics())


def test_too_few_classes_and_empty_loaders_are_said():
    with pytest.raises(iso.UserError, match="class 4, but the model has 2 classes"):
        evaluate(Says(torch.zeros(1, 2)), [(torch.zeros(1, 1), torch.tensor([4]))])
    refused("no batch", lambda: evaluate(Says(torch.zeros(1, 2)), []))


def test_batches_that_are_not_images_and_one_label_each_are_said():
    images = torch.zeros(2, 1)
    labels = torch.zeros(2, dtype=torch.long)
    for given, said in {
        "a Tensor": (images, labels),
        "a dict": [{"images": images, "labels": labels}],
        "a list": [[images, labels, labels]],
        r"float32 labels of shape \(2, 3\)": [(images, torch.eye(3)[labels])],
        r"float32 labels of shape \(2,\)": [(images, torch.zeros(2))],
    }.items():
        refused(
            f"one class number for each image, not {given}; give",
            evaluate,
            Says(torch.zeros(1, 3)),
            said,
        )


def test_macs_count_convolutions_and_attention_in_any_form():
    assert count_macs(nn.Conv2d(3, 8, 3, padding=1), (3, 10, 12)) == 8 * 3 * 9 * 120
    N = 64
    C = 16
    nh = 9
    hd = 2
    projections = N * C * (2 * nh * hd + C)
    attention = nh * N * ((N + 1) * hd + N * C)
    taps = 8 * C * nh * N
    layer = iso.layers.GPSA2d(C, 8, 3, 1, 1)
    assert count_macs(layer, (C, 8, 8)) == projections + attention + taps
    # by position along rows and columns
    N = 24 * 24
    C = 64
    hd = 8
    projections = N * C * (2 * nh * hd + C)
    content = nh * N * (N + 1) * (hd + C)
    position = 2 * nh * 24 * N * C
    taps = 2 * C * C * nh * N
    layer = iso.layers.GPSA2d(C, C, 3, 1, 1)
    assert count_macs(layer, (C, 24, 24)) == projections + content + position + taps


def test_every_module_gets_its_own_mode_back():
    model = timm.create_model("t_cifar_resnet20").train()
    model.bn1.eval()
    loader = [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))]
    evaluate(model, loader)
    iso.attention_maps(model, loader[0][0])
    throughput(model, (3, 32, 32), 1, seconds=0.01)
    assert model.training
    assert not model.bn1.training


@pytest.mark.slow
@pytest.mark.parametrize(("name", "top1"), [("cifar_resnet20", 79.8), ("cifar_resnet56", 83.0)])
def test_published_weights(name, top1, data_root):
    """Within one image of what was measured on the first 500 JPEGs; all 10,000 give 81.03 and 83.20."""
    model = timm.create_model(name, pretrained=True)
    source = iso.data.open_source("cifar10", "test").subset(range(500))
    loader = iso.data.eval_loader(source, resolve_data_config(model=model), 200)
    assert iso.evaluate(model, loader)["top1"] == pytest.approx(top1, abs=0.25)
