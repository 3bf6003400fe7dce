"""Several processes measure what one does, to the last digit, and go on with each other's results."""

import json

import pytest
import timm
import torch
from PIL import Image

import isomorph as iso
from command_line import isomorph
from isomorph.lab.evaluation.accuracy import MultiLabelCounts, PredictionCounts, sum_counts
from small_models import CONVIT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small network that is unsure, so that its loss has many digits."""
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    torch.manual_seed(0)
    net = iso.models.create("convit_ti", **CONVIT)
    torch.nn.init.normal_(net.head.weight)
    iso.save(net, path)
    return path


def answer(*arguments, processes=1):
    run = isomorph(*arguments, "--device", "cpu", "--json", processes=processes)
    assert run.returncode == 0, run.stderr
    printed = [line for line in run.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert len(printed) == 1
    return json.loads(printed[0])


def test_evaluation_equals_that_of_one_process(model, tmp_path):
    """Uneven shares (2 batches for 3 processes), metrics and classes."""
    options = ["--batch-size", "40", "--max-images", "50", "--no-cost", "--per-class"]
    wanted = ["evaluate", model, "--data", "digits", *options]
    one = answer(*wanted, tmp_path / "one.csv")
    assert one["nll"] > 0.1
    assert answer(*wanted, tmp_path / "many.csv", processes=3) == one
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()


def test_robustness_equals_that_of_one_process_and_resumes_it(model, tmp_path):
    """Begun by one process, finished by two."""
    wanted = [
        "robustness",
        model,
        "--data",
        "digits",
        "--max-images",
        "45",
        "--batch-size",
        "20",
        "--severity",
        "1",
    ]
    both = [*wanted, "--severity", "4", "--corruption", "fog", "--corruption", "contrast"]
    one = answer(*both)
    answer(*wanted, "--corruption", "fog", "--out", tmp_path / "two.jsonl")
    two = answer(*both, "--out", tmp_path / "two.jsonl", processes=2)
    assert two["resumed"] == 1
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == 2 + 4
    assert two["clean"] == one["clean"]
    cells = [cell for cell in one["cells"] if cell["corruption"] == "contrast"]
    others = [cell for cell in two["cells"] if cell["corruption"] == "contrast"]
    assert cells == others  # those of fog were measured in other batches


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_other_tasks_equal_those_of_one_process(task, tmp_path):
    """Mean IoU and AP of five images, three for one process and two for the other."""
    split = tmp_path / "data" / "val"
    images = []
    boxes = []
    for number in range(5):
        for kind, size in {"images": (48, 40, 3), "masks": (48, 40)}.items():
            values = torch.randint(
                0, 256 if kind == "images" else 3, size, dtype=torch.uint8
            ).numpy()
            (split / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(split / kind / f"{number}.png")
        images.append(
            {"id": number, "file_name": f"images/{number}.png", "width": 40, "height": 48}
        )
        box = [0, 0, 40 - number, 48 - number]  # nearly all of the image, so that chance finds some
        boxes.append({"id": number, "image_id": number, "category_id": 1 + number % 2, "bbox": box})
    categories = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    (split / "val.json").write_text(
        json.dumps({"images": images, "annotations": boxes, "categories": categories})
    )
    (tmp_path / "data/classes.txt").write_text("a\nb\nc\n")
    vit = dict(
        backbone="tdrl_vit_ti", backbone_kwargs=dict(embed_dim=24, num_heads=2, depth=1), channels=8
    )
    name, arguments, options, source = {
        "segmentation": ("upernet", dict(num_classes=3), dict(crop=[32, 32], resize=None), "masks"),
        "detection": (
            "mask_rcnn",
            dict(num_classes=2, masks=False, features=16),
            dict(masks=False),
            "coco",
        ),
    }[task]
    torch.manual_seed(0)
    net = timm.create_model(name, img_size=32, **vit, **arguments)
    own = dict(
        source=source, task={"name": task, **options}, input_size=(3, 32, 32), label_names=[]
    )
    net.pretrained_cfg = {**net.pretrained_cfg, **own}
    iso.save(net, tmp_path / "net.safetensors")
    data = tmp_path / "data" if task == "segmentation" else split
    wanted = ["evaluate", tmp_path / "net.safetensors", "--data", data]
    one = answer(*wanted)
    assert (
        max(value for row in one["rows"] for key, value in row.items() if key in ("miou", "box_ap"))
        > 0
    )
    assert answer(*wanted, processes=2) == one


def test_sums_do_not_depend_on_order_or_grouping():
    """In float64 the order of additions shows in the last digits; here it must not."""
    logits = 3 * torch.randn(2000, 7)
    labels = torch.randint(7, (2000,))

    def counted(order, parts):
        shares = []
        for part in order.chunk(parts):
            shares.append(PredictionCounts(7))
            for batch in part.split(33):
                shares[-1].add(logits[batch], labels[batch])
        return sum_counts(shares).metrics()

    whole = counted(torch.arange(2000), 1)
    assert all(counted(torch.randperm(2000), parts) == whole for parts in (1, 2, 3, 8))
    exact = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert whole["nll"] == pytest.approx(exact, abs=1e-7)
    shares = [MultiLabelCounts(), MultiLabelCounts()]
    for share, part in zip(shares, (slice(0, 700), slice(700, 2000)), strict=True):
        share.add(logits[part], labels[part, None])
    assert sum_counts(shares).metrics() == {"top1": whole["top1"], "images": 2000}
