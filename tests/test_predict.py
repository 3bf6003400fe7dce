"""`isomorph predict`: classes of an image, files written, and errors in one line."""

import json

import numpy as np
import pytest
from PIL import Image

from command_line import isomorph
from isomorph.cli.evaluate import _planned_files
from refusals import refused


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(path)
    return path


def predict(photo, *arguments):
    image = () if "--image" in arguments else ("--image", photo)
    return isomorph(
        "predict", "cifar_resnet20", "--no-pretrained", "--device", "cpu", *image, *arguments
    )


def test_the_five_likeliest_classes(photo):
    done = predict(photo, "--out", photo.with_name("classes.json"), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    shares = [row["probability"] for row in rows]
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)
    assert json.loads(photo.with_name("classes.json").read_text()) == rows


def test_an_exported_model(photo):
    model = photo.with_name("m.pt2")
    done = isomorph("export", "cifar_resnet20", "--no-pretrained", "--out", model)
    assert done.returncode == 0, done.stderr
    done = isomorph("predict", model, "--image", photo, "--json")
    both = [json.loads(each.stdout)["rows"] for each in (done, predict(photo, "--json"))]
    assert [row["class"] for row in both[0]] == [row["class"] for row in both[1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "nothing.png"], '"nothing.png" does not exist'),
        (["--out", "{photo}"], "is the image itself"),
        (["--out", "y.png"], "must end in .json for this model"),
        (["--out", "{exists}"], "exists; give --overwrite"),
    ],
)
def test_errors(photo, arguments, message):
    exists = photo.with_name("there.json")
    exists.write_text("{}")
    before = sorted(photo.parent.iterdir())
    done = predict(photo, *(argument.format(photo=photo, exists=exists) for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(photo.parent.iterdir()) == before


def test_no_further_file_replaces_the_image(tmp_path):
    image = tmp_path / "x-mask.png"
    Image.new("RGB", (4, 4)).save(image)
    files = {".png": 1, "-mask.png": 2}
    refused("is the image itself", _planned_files, files, tmp_path / "x.png", image, True)
