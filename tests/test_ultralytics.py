"""The guide for YOLO: ultralytics' trainer keeps inserted layers by its own hook, and loses them without it."""

import os
from copy import deepcopy

import numpy as np
import pytest
import torch
from PIL import Image

import isomorph as iso
from requirements import missing


@pytest.fixture
def ultralytics(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    try:
        import ultralytics
    except ImportError:
        if os.environ.get("ISOMORPH_REQUIRE_ALL"):
            pytest.skip(
                "ultralytics (AGPL-3.0) is not among the packages of CI: pip install ultralytics"
            )
        missing("needs ultralytics (AGPL-3.0): pip install ultralytics")
    return ultralytics


def write_boxes(folder):
    """Two images of noise with a box each, in the format of YOLO."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "images" / f"{number}.png")
        (folder / "labels" / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    described = folder / "data.yaml"
    described.write_text(f"path: {folder}\ntrain: images\nval: images\nnames:\n  0: box\n")
    return described


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_hook_of_the_trainer_keeps_inserted_layers(ultralytics, tmp_path):
    from ultralytics.models.yolo.detect import DetectionTrainer

    torch.manual_seed(0)
    network = ultralytics.YOLO("yolov8n.yaml").model.eval()
    images = torch.rand(2, 3, 64, 64)
    inserted = iso.insert(network, iso.layers.MapAttention, after="model.9", example=images)
    assert iso.verify(network, inserted, images).fp32 == 0

    class KeepsLayers(DetectionTrainer):
        def get_model(self, cfg=None, weights=None, verbose=True):
            return deepcopy(inserted).train().requires_grad_(True)

    given = dict(
        data=str(write_boxes(tmp_path / "boxes")),
        epochs=1,
        imgsz=64,
        batch=2,
        workers=0,
        device="cpu",
    )
    given |= dict(project=str(tmp_path / "runs"), plots=False, val=False, verbose=False, amp=False)
    given |= dict(model="yolov8n.yaml", warmup_epochs=0, lr0=0.1, optimizer="SGD")
    trainer = KeepsLayers(overrides=given)
    trainer.train()
    (gamma,) = iso.analysis.gammas(trainer.model).values()
    assert gamma.abs().max() > 0
    plain = DetectionTrainer(overrides=given)
    plain.setup_model()
    assert not [name for name, _ in plain.model.named_parameters() if "inserted" in name]
