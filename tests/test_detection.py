"""Detection: COCO's format and what is wrong with it, joint transforms, AP equal to pycocotools', runs, predictions."""

import contextlib
import io
import json
import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from pycocotools import mask as codec
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.models.detection.image_list import ImageList
from torchvision.transforms.v2.functional import normalize

import isomorph as iso
from command_line import isomorph
from isomorph.errors import NotFinite
from isomorph.lab.tasks.detection import data as detection_data
from isomorph.lab.tasks.detection.results import Results, as_results, ground_truth, metric_rows
from isomorph.lab.tasks.detection.task import DetectionPart, GuidedDetectionLoss, guided_losses
from isomorph.lab.training.optim import learning_rate_scales
from isomorph.lab.training.recipe.recipe import validate
from refusals import refused
from tiny_runs import same_snapshots, stopped_run

CONFIG = dict(input_size=(3, 48, 64), mean=(0.5,) * 3, std=(0.5,) * 3)
SQUARE = [10, 10, 30, 10, 30, 30, 10, 30]


def coco(images=1, **changes):
    """Annotations of images with a square and a crowd each."""
    content = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 7, "name": "cell"}, {"id": 3, "name": "square"}],
    }
    for i in range(images):
        image = {"id": i, "file_name": f"{i}.png", "width": 64, "height": 48}
        square = {"category_id": 3, "bbox": [10, 10, 20, 20], "segmentation": [SQUARE]}
        runs = {"size": [48, 64], "counts": [0, 48 * 10, 48 * 54]}
        crowd = {"category_id": 7, "bbox": [0, 0, 9, 48], "segmentation": runs, "iscrowd": 1}
        content["images"].append(image)
        content["annotations"].append({"id": 2 * i, "image_id": i, **square})
        content["annotations"].append({"id": 2 * i + 1, "image_id": i, **crowd})
    return content | changes


def white_square():
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[10:30, 10:30] = 255
    return Image.fromarray(picture)


def write(root, content=None, split="train", images=1):
    if content is None:
        content = coco(images)
    (root / f"{split}.json").write_text(json.dumps(content))
    (root / "images").mkdir(exist_ok=True)
    for image in content["images"]:
        white_square().save(root / "images" / image["file_name"])
    return root


def changed(**fields):
    content = coco()
    content["annotations"][0].update(fields)
    return content


def open_changed(folder, masks=True, **fields):
    """A source whose first object has other fields."""
    return detection_data.open_annotated(write(folder, changed(**fields)), "train", masks=masks)


def encoded(mask):
    return codec.encode(np.asfortranarray(mask))["counts"].decode()


class TestData:
    def test_objects_of_an_image(self, tmp_path):
        source = detection_data.open_annotated(write(tmp_path), "train", masks=True)
        image, objects = source[0]
        assert image.size == (64, 48)
        assert source.classes == ("square", "cell")  # by number: 3, 7
        assert objects["labels"].tolist() == [0]  # the crowd is left out
        assert objects["boxes"].tolist() == [[10, 10, 30, 30]]
        (mask,) = objects["masks"]
        assert mask.sum() == 400
        white = torch.tensor(np.asarray(image)[..., 0] > 0)
        assert torch.equal(mask.bool(), white)

    def test_masks_from_polygons_and_rle(self, tmp_path):
        mask = np.zeros((48, 64), np.uint8)
        mask[10:30, 10:30] = 1
        text = {"size": [48, 64], "counts": encoded(mask)}
        counts = {"size": [48, 64], "counts": [10 * 48 + 10, *[20, 28] * 19, 20, 48 * 34 + 18]}
        for outline in ([SQUARE], text, counts, text | {"size": [48.0, 64.0]}):
            source = open_changed(tmp_path, segmentation=outline)
            drawn = source.objects(0)["masks"][0]
            assert torch.equal(drawn, torch.from_numpy(mask))
        assert detection_data.draw_masks([], 4, 5).shape == (0, 4, 5)

    def test_rle_text_is_read_as_pycocotools_writes_it(self):
        rng = np.random.default_rng(0)
        for height, width in ((1, 1), (7, 5), (48, 64), (600, 500)):
            for share in (0.0, 0.01, 0.5, 1.0):
                mask = (rng.random((height, width)) < share).astype(np.uint8)
                runs = detection_data.run_lengths(encoded(mask))
                alternating = np.arange(len(runs)) % 2
                drawn = alternating.repeat(runs).reshape(width, height).T
                np.testing.assert_array_equal(drawn, mask)

    def test_missing_fields_are_those_of_coco(self, tmp_path):
        """iscrowd 0, the box around the outline, and the area of the outline, which is not its box's."""

        def annotations_of(source):
            return ground_truth(source).dataset["annotations"]

        triangle = [10, 10, 30, 10, 10, 30]
        (outline,) = codec.frPyObjects([triangle], 48, 64)
        source = open_changed(tmp_path, segmentation=[triangle], bbox=None)
        first, crowd = annotations_of(source)
        assert first["iscrowd"] == 0
        assert crowd["iscrowd"] == 1
        assert first["bbox"] == codec.toBbox(outline).tolist()
        assert first["area"] == float(codec.area(outline))
        assert first["area"] < 250 < 20 * 20

        source = open_changed(tmp_path, area=7.5, iscrowd=False)
        assert annotations_of(source)[0]["area"] == 7.5
        source = open_changed(tmp_path, segmentation=None, masks=False)
        assert annotations_of(source)[0]["area"] == 400

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (coco(annotations=None), r"train.json has no list 'annotations'"),
            (changed(bbox=[10, 10, 0, 20]), "annotation 0 .* no area"),
            (changed(category_id=90), "annotation 0 .* category_id 90; .* 3, 7"),
            (changed(segmentation=[]), r"annotation 0 has no segmentation; .*task.masks false"),
            (changed(segmentation={"size": [4, 4], "counts": [16]}), r"RLE mask of size \[4, 4\]"),
            (coco() | {"images": coco()["images"] * 2}, r"two images with id 0"),
        ],
    )
    def test_what_is_wrong_is_said(self, tmp_path, content, message):
        path = tmp_path / "train.json"
        path.write_text(json.dumps(content))
        refused(message, detection_data.read_annotations, path, masks=True)

    @pytest.mark.parametrize("counts", [[16], [-1, 3073], "@@@@zzz"])
    def test_counts_that_are_no_mask(self, tmp_path, counts):
        path = tmp_path / "train.json"
        content = changed(segmentation={"size": [48, 64], "counts": counts})
        path.write_text(json.dumps(content))
        message = "annotation 0 has an RLE mask whose cou"
        refused(message, detection_data.read_annotations, path, masks=True)

    def test_text_that_is_no_json(self, tmp_path):
        path = tmp_path / "train.json"
        path.write_text("{")
        refused(r"cannot read .*train.json", detection_data.read_annotations, path, masks=True)

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("3.png", r"has no file 3.png, of the images in .*train.json"),
            ("../0.png", r"train.json names the file '../0.png', outside .*images"),
            ("/etc/passwd", "outside .*images"),
        ],
    )
    def test_paths_stay_inside_their_folder(self, tmp_path, file, message):
        content = coco()
        write(tmp_path, content)
        content["images"][0]["file_name"] = file
        (tmp_path / "train.json").write_text(json.dumps(content))
        Image.new("RGB", (64, 48)).save(tmp_path / "0.png")
        refused(message, detection_data.open_annotated, tmp_path, "train", masks=False)

    def test_test_images_need_something_to_find(self, tmp_path):
        content = coco(3)
        content["annotations"] = content["annotations"][:2]  # of the first image
        write(tmp_path, images=3)
        write(tmp_path, content, "val")
        data = TINY["data"] | {"root": str(tmp_path), "test_images": 1}
        few = validate(recipe(tmp_path, data=data))
        said = "val.json has no objects, or crowds only, in 1 images"
        refused(said, few.task.task.open_data, few)

    def test_bad_boxes_and_crowds_alone_may_be_left_out(self, tmp_path):
        content = coco(2)
        content["annotations"][0]["bbox"] = [10, 10, 0, 20]
        (tmp_path / "a.json").write_text(json.dumps(content))
        found = detection_data.read_annotations(tmp_path / "a.json", masks=True, skip=1)
        assert [len(image.objects) for image in found.images] == [1, 2]


class TestTransforms:
    def test_scale_1_without_a_flip_fits_the_image(self):
        pixels = np.random.default_rng(0).integers(0, 255, (24, 64, 3), np.uint8)
        image = Image.fromarray(pixels)
        objects = {"boxes": torch.tensor([[8.0, 4, 24, 20]]), "labels": torch.tensor([1])}
        transform = detection_data.TrainTransform(CONFIG, (1.0, 1.0), 0.0)
        x, left = transform((image, objects))
        expected, inside = detection_data.FitTransform(CONFIG).fit(image)
        torch.testing.assert_close(x, expected)
        assert inside == (24, 64)
        assert left["boxes"].tolist() == [[8, 4, 24, 20]]
        assert (x[:, 24:] == 0).all()  # padded below

    def test_boxes_follow_masks_through_random_crops(self):
        transform = detection_data.TrainTransform(CONFIG, (0.5, 4.0), 0.5)
        corner = [0, 0, 5, 0, 5, 5, 0, 5]
        seen = set()
        for seed in range(12):
            torch.manual_seed(seed)
            masks = detection_data.draw_masks([[SQUARE], [corner]], 48, 64)
            objects = {"boxes": torch.zeros(2, 4), "labels": torch.tensor([1, 2]), "masks": masks}
            x, left = transform((white_square(), objects))
            assert x.shape == (3, 48, 64)
            boxes, labels, masks = left["boxes"].int(), left["labels"], left["masks"]
            seen.add(len(labels))
            for box, label, mask in zip(boxes, labels, masks, strict=True):
                rows, columns = torch.where(mask)
                left, top, right, bottom = box.tolist()
                assert (left, right) == (columns.min(), columns.max() + 1)
                assert (top, bottom) == (rows.min(), rows.max() + 1)
                if label == 1 and len(rows) > 50:  # the square is white
                    assert x[0][mask.bool()].mean() > 0.6
        assert {0, 2} & seen
        assert len(seen) > 1  # some crops leave objects out


def random_results(source, seed=0):
    """The truth, moved and mixed with noise."""
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for index, record in enumerate(source.samples):
        objects = source.objects(index)
        n = len(objects["labels"])
        boxes = objects["boxes"] + 6 * torch.randn(n, 4, generator=generator)
        ends = boxes[:, 2:]
        starts = torch.minimum(boxes[:, :2], ends - 1)
        boxes = torch.cat([starts, ends], 1).clamp(min=0)
        is_wrong = torch.rand(n, generator=generator) < 0.2
        wrong = (objects["labels"] + 1) % len(source.classes)
        labels = torch.where(is_wrong, wrong, objects["labels"])
        found = {"boxes": boxes, "labels": labels, "scores": torch.rand(n, generator=generator)}
        if source.masks:
            found["masks"] = objects["masks"].roll(4, -1).bool()
        entries += as_results(found, record, source.category_ids)
    return Results(entries, [record.id for record in source.samples])


def scattered(images=30, seed=0):
    """Annotations of rectangles and triangles of many sizes, some of them crowds, some images without any."""
    rng = np.random.default_rng(seed)
    content = coco(images, annotations=[])
    for image in content["images"]:
        image |= {"width": 320, "height": 240}
    for number in range(6 * images):
        left = int(rng.integers(0, 250))
        top = int(rng.integers(0, 180))
        width = int(rng.integers(4, 320 - left))
        height = int(rng.integers(4, 240 - top))
        outline = [left, top, left + width, top, left, top + height]
        if number % 2:
            outline += [left + width, top + height]
        area = float(width * height)
        if number % 2 == 0:
            area = area / 2
        annotation = {
            "id": number + 1,
            "image_id": int(rng.integers(0, images - 2)),
            "category_id": 3 if number % 3 else 7,
            "bbox": [left, top, width, height],
            "area": area,
            "segmentation": [outline],
            "iscrowd": 0,
        }
        content["annotations"].append(annotation)
    return content


AP_KEYS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def stats_of_pycocotools(source, results, kind, other):
    """The AP of boxes or masks, of predictions without the `other` of both."""
    predictions = []
    for entry in results.entries:
        predictions.append({key: value for key, value in entry.items() if key != other})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(source.annotations))
        run = COCOeval(truth, truth.loadRes(predictions), kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
    return run.stats


@pytest.mark.parametrize(("seed", "masks"), [(0, True), (1, False)])
def test_ap_equals_pycocotools_on_the_same_predictions(tmp_path, seed, masks):
    root = write(tmp_path, scattered(seed=seed))
    source = detection_data.open_annotated(root, "train", masks)
    results = random_results(source)
    metrics, *classes = metric_rows(source, results)
    kinds = [("bbox", "box", "segmentation")]
    if masks:
        kinds.append(("segm", "mask", "bbox"))
    for kind, prefix, other in kinds:
        stats = stats_of_pycocotools(source, results, kind, other)
        for key, expected in zip(AP_KEYS, stats, strict=False):
            name = f"{prefix}_{key}"
            if expected >= 0:
                assert metrics[name] == pytest.approx(100 * expected, abs=1e-9)
            else:
                assert name not in metrics
    mean_of_classes = np.mean([row["box_ap"] for row in classes])
    assert mean_of_classes == pytest.approx(metrics["box_ap"])
    assert metrics["images"] == len(source)


VIT = dict(embed_dim=24, num_heads=3, depth=1)
HEADS = dict(channels=16, features=32, proposals=30, samples=16)
NETWORK = dict(name="mask_rcnn", kwargs=dict(backbone="tdrl_vit_ti", backbone_kwargs=VIT, **HEADS))
TINY = dict(name="squares", model=NETWORK, optim={"lr": 3e-3}, epochs=2, checkpoint_minutes=0)
TINY |= dict(task={"name": "detection", "scales": [0.8, 1.5]})
TINY |= dict(data={"source": "coco", "size": [48, 64], "batch_size": 4})


def recipe(root, **changes):
    data = TINY["data"] | {"root": str(root), "unreadable": 9}
    return TINY | {"data": data} | changes


def train(root, out):
    return iso.train(validate(recipe(root, out=str(out))), show=False)


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """A folder of images, and a run on it."""
    root = tmp_path_factory.mktemp("squares")
    write(root, images=8)
    write(root, split="val", images=4)
    (root / "images/3.png").write_bytes(b"damaged")
    content = coco(3)  # the test data has no damaged file
    (root / "val.json").write_text(json.dumps(content))
    return root, train(root, root / "run")


class TestRun:
    def test_it_learns_and_counts_what_is_damaged(self, squares):
        _, result = squares
        log = (result.folder / "log.jsonl").read_text()
        first, second = (json.loads(line) for line in log.splitlines())
        assert second["loss"] < first["loss"]
        assert second["unreadable"] == 1
        assert result.metrics["images"] == 3
        assert 0 <= result.metrics["mask_ap"] <= 100

    def test_a_stopped_run_goes_on_bit_for_bit(self, squares):
        root, result = squares
        stopped_run(root / "part", 3, recipe(root))
        train(root, root / "part")
        same_snapshots(result.folder, root / "part")

    def test_its_file_knows_task_and_classes(self, squares):
        root, result = squares
        model = iso.load(result.folder / "model.safetensors")
        assert model.pretrained_cfg["label_names"] == ["square", "cell"]
        assert tuple(model.pretrained_cfg["input_size"]) == (3, 48, 64)
        metrics = iso.evaluate(model, root)
        expected = dict(result.metrics)
        expected.pop("loss", None)
        assert metrics == expected
        fused = iso.fuse(model.eval())
        metrics = iso.evaluate(fused, root / "val.json")
        assert metrics["images"] == 3

    def test_predictions(self, squares, tmp_path):
        root, result = squares
        image = root / "images/0.png"
        done = isomorph("predict", result.folder, "--image", image, "--out", tmp_path / "y.png")
        assert not done.returncode, done.stderr
        with Image.open(tmp_path / "y.png") as picture:
            assert picture.size == (64, 48)
        for each in json.loads((tmp_path / "y.json").read_text()):
            assert set(each) == {"label", "name", "score", "box", "segmentation"}


def detectors(*widths):
    options = dict(num_classes=2, masks=False, img_size=64, **NETWORK["kwargs"])
    return [timm.create_model("mask_rcnn", **options | {"channels": width}) for width in widths]


class TestDistillation:
    def test_the_teacher_gets_images_in_its_own_normalisation(self):
        def normalised_for(model):
            config = model.pretrained_cfg
            return normalize(pixels, list(config["mean"]), list(config["std"]))

        student, teacher = detectors(16, 16)
        of_teacher = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.5, 0.25)}
        teacher.pretrained_cfg = {**teacher.pretrained_cfg, **of_teacher}
        task = GuidedDetectionLoss(student, teacher, torch.device("cpu"), DetectionPart())
        pixels = torch.rand(2, 3, 64, 64)
        given = task.teacher.images(normalised_for(student))
        torch.testing.assert_close(given, normalised_for(teacher))

    def test_the_losses_of_a_map(self):
        generator = torch.Generator().manual_seed(0)
        adapted, theirs = torch.randn(2, 2, 3, 4, 5, generator=generator, dtype=torch.float64)
        scores, wanted = torch.randn(2, 2, 2, 4, 5, generator=generator, dtype=torch.float64)
        top = bottom = below = 0.0
        for b, i, j in np.ndindex(2, 4, 5):
            m = wanted[b, :, i, j].max().sigmoid()
            bottom += m
            for c in range(3):
                difference = theirs[b, c, i, j] - adapted[b, c, i, j]
                top += m * difference**2
            for a in range(2):
                s = scores[b, a, i, j].sigmoid()
                t = wanted[b, a, i, j].sigmoid()
                agreement = t * s.log() + (1 - t) * (1 - s).log()
                below -= m * agreement
        features, objectness = guided_losses(adapted, scores, theirs, wanted)
        assert features.item() == pytest.approx((top / bottom).item(), rel=1e-5)
        assert objectness.item() == pytest.approx((below / bottom).item(), rel=1e-5)

    def test_a_frozen_teacher_guides_after_its_ramp(self):
        student, teacher = detectors(16, 24)
        part = DetectionPart(ramp=2)
        task = GuidedDetectionLoss(student, teacher, torch.device("cpu"), part).train()
        assert not teacher.training
        targets = [{"boxes": torch.tensor([[3.0, 4, 40, 50]]), "labels": torch.tensor([1])}]
        x = torch.randn(1, 3, 64, 64)
        for guides in (False, True, True):
            losses = task(x, targets)
            assert (losses["loss_features"].item() > 0) == guides
        losses["loss"].backward()
        for p in task.trainable_module.parameters():
            assert p.grad is not None
        for p in teacher.parameters():
            assert p.grad is None
        scales = learning_rate_scales(task.trainable_module, 0.5)
        assert scales.keys() == dict(task.trainable_module.named_parameters()).keys()
        assert scales["adapt.0.weight"] == 1
        assert scales["student.backbone.patch_embed.proj.weight"] == 0.25


def test_outputs_that_are_not_finite_have_no_metric(squares):
    root, result = squares
    model = iso.load(result.folder / "model.safetensors")
    bias = model.get_parameter("rpn.head.cls_logits.bias")
    with torch.no_grad():
        bias[0] = math.nan
    with pytest.raises(NotFinite, match=r"outputs are not finite"):
        iso.evaluate(model, root)


def test_anchors_lie_where_the_positions_do():
    small = dict(num_classes=2, masks=False, channels=16, features=16, score_threshold=0.0)
    model = timm.create_model("mask_rcnn", backbone="resnet18", **small).eval()
    x = torch.randn(1, 3, 200, 168)
    maps = list(model.pyramid_maps(x).values())
    (boxes,) = model.rpn.anchor_generator(ImageList(x, [tuple(x.shape[-2:])]), maps)
    positions = maps[0][0, 0].numel()
    last = boxes[3 * positions - 3]  # three anchors a position of the finest map
    centre = (last[:2] + last[2:]) / 2
    assert centre.tolist() == [4 * (192 // 4 - 1), 4 * (224 // 4 - 1)]
    padded = torch.nn.functional.pad(x, (0, 24, 0, 24))
    (here,) = model.detect(x)
    (there,) = model.detect(padded, [(200, 168)])
    torch.testing.assert_close(here["boxes"], there["boxes"])


def test_a_network_with_a_teacher_is_recast_at_the_start():
    guided = TINY["task"] | {"teacher": "resnet18"}
    late = TINY | {"task": guided, "model": NETWORK | {"recast_epoch": 1}}
    refused("recast_epoch does not work with task.teacher", validate, late)


def test_images_are_those_of_the_split_of_the_annotation_file(tmp_path):
    splits = ("train", "val", "test")
    for split in splits:
        (tmp_path / split).mkdir()
        white_square().save(tmp_path / split / "0.png")
        (tmp_path / f"{split}.json").write_text(json.dumps(coco()))
    for split in splits:
        name = f"{split}.json"
        source = detection_data.open_annotated(tmp_path, "test", masks=True, annotations=name)
        assert source.path(0).parent.name == split
