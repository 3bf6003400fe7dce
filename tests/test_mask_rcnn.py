"""Mask R-CNN: published sizes, any backbone and any rectangle, surgery on the whole network, its checkpoints."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch.utils._pytree import tree_leaves
from torchvision.ops import roi_align

import isomorph as iso
from isomorph.models.task_networks.backbone import backbone_state
from isomorph.models.task_networks.mask_rcnn import PyramidRoIAlign, StrideAnchors, WindowedViT
from refusals import refused

SMALL = dict(num_classes=3, channels=8, features=16, proposals=30, samples=16, img_size=64)
VIT = dict(embed_dim=12, num_heads=3, depth=2)


def detector(backbone="tdrl_vit_ti", **kwargs):
    torch.manual_seed(0)
    own = {"backbone_kwargs": VIT} if "vit" in backbone else {}
    own |= (
        {"backbone_kwargs": VIT | {"local_up_to_layer": 1, "num_heads": 4}}
        if backbone == "convit_ti"
        else {}
    )
    return timm.create_model("mask_rcnn", backbone=backbone, **{**SMALL, **own, **kwargs})


@pytest.mark.parametrize("backbone", ["tdrl_vit_ti", "resnet18", "convit_ti"])
def test_losses_and_detections_on_odd_rectangles(backbone):
    model = detector(backbone)
    x = torch.randn(2, 3, 70, 45)
    targets = [
        {
            "boxes": torch.tensor([[3.0, 4, 40, 50]]),
            "labels": torch.tensor([2]),
            "masks": torch.ones(1, 70, 45, dtype=torch.uint8),
        },
        {
            "boxes": torch.zeros(0, 4),
            "labels": torch.zeros(0, dtype=torch.int64),
            "masks": torch.zeros(0, 70, 45),
        },
    ]
    losses = model(x, targets)
    assert set(losses) == {
        "loss_objectness",
        "loss_rpn_box_reg",
        "loss_classifier",
        "loss_box_reg",
        "loss_mask",
    }
    sum(losses.values()).backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()
    model.eval()
    found = model.detect(x, [(70, 45), (30, 45)])
    for each in found:
        n = len(each["labels"])
        assert each["boxes"].shape == (n, 4)
        assert each["masks"].shape == (n, 1, 28, 28)
        assert ((each["labels"] >= 0) & (each["labels"] < 3)).all()
        assert (each["scores"].diff() <= 0).all()
    assert len(found[1]["labels"])
    assert found[1]["boxes"][:, 3].max() <= 30  # nothing in the padding


def test_a_backbone_keeps_one_map_of_each_resolution():
    cnn = detector("cifar_resnet20", masks=False)
    assert cnn.strides == (1, 2, 4, 8)
    assert cnn.rpn.head.cls_logits.in_channels == 8
    assert cnn.roi_heads.box_predictor.cls_score.in_features == 16
    with torch.device("meta"):
        blocks = timm.create_model(
            "mask_rcnn", backbone_kwargs=dict(layout="plain", num_heads=3)
        ).backbone.blocks
        assert [block.attn.window for block in blocks].count(None) == 4
        assert [len(blocks[i].attn.rel_pos_h) for i in (0, 2)] == [27, 127]
        # two stages have stride 16
        assert detector("t_resnet50d", masks=False).strides == (4, 8, 16, 32)
        vit = detector("vit_tiny_patch16_224", img_size=(48, 64))
        assert isinstance(vit.backbone, WindowedViT)
        assert vit.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
        assert tuple(vit.pretrained_cfg["input_size"]) == (3, 48, 64)
        assert not isinstance(detector("vit_tiny_patch16_224", window=0).backbone, WindowedViT)


def test_a_window_network_is_the_vit_where_the_window_covers_the_image():
    vit = timm.create_model(
        "vit_tiny_patch16_224", class_token=False, global_pool="avg", dynamic_img_size=True, **VIT
    )
    vit.eval()
    x = torch.randn(1, 3, 224, 224)
    expected = vit.forward_intermediates(x, indices=1, norm=False, intermediates_only=True)[0]
    torch.testing.assert_close(WindowedViT(vit, (224, 224), 14)(x)[0], expected)


@pytest.fixture(scope="module")
def plain():
    return detector(backbone_kwargs={**VIT, "layout": "plain"}).eval()


class TestSurgery:
    def test_recast_verify_fuse_of_the_whole_network(self, plain, tmp_path):
        x = torch.randn(1, 3, 50, 70)
        wide = iso.recast(
            plain,
            iso.LinearToPyramid(),
            where=["backbone.blocks.*.mlp.fc?", "roi_heads.box_head.5"],
        )
        report = iso.verify(plain, wide, x)
        assert report.passed
        assert len(report.targets) == 5
        fused = iso.fuse(wide)
        iso.verify(plain, fused, x)
        iso.save(fused, tmp_path / "fused.safetensors")
        torch.testing.assert_close(iso.load(tmp_path / "fused.safetensors").eval()(x), fused(x))

    def test_verify_sees_a_change_in_any_head(self, plain):
        other = iso.recast(plain, iso.LinearToPyramid(), where="roi_heads.box_head.5")
        with torch.no_grad():
            other.roi_heads.mask_predictor.mask_fcn_logits.bias += 0.1
        with pytest.raises(iso.UserError, match="NOT equal"):
            iso.verify(plain, other, torch.randn(1, 3, 64, 64))


class TestWeights:
    def test_a_classifier_fills_the_backbone(self, tmp_path):
        vit = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=7, **VIT)
        iso.save(vit, tmp_path / "vit.safetensors")
        model = detector("vit_tiny_patch16_224", backbone_kwargs={**VIT, "img_size": 96})
        new = iso.load_weights(model, tmp_path / "vit.safetensors", fresh_head=True)
        assert any(name.startswith("rpn.") for name in new)
        assert {name.rpartition(".")[2] for name in new if "backbone" in name} == {
            "rel_pos_h",
            "rel_pos_w",
        }
        torch.testing.assert_close(
            model.backbone.blocks[1].mlp.fc1.weight, vit.blocks[1].mlp.fc1.weight
        )
        # without the class token's
        torch.testing.assert_close(model.backbone.pos_embed, vit.pos_embed[:, 1:])
        larger = detector("vit_tiny_patch16_224")
        iso.load_weights(larger, tmp_path / "vit.safetensors", fresh_head=True)
        assert larger.backbone.pos_embed.shape == (1, 196, 12)

    def test_a_classifier_with_pyramids_and_one_without_fill_pyramids(self, tmp_path):
        for layout in ("P-W2S", "plain"):
            vit = timm.create_model("tdrl_vit_ti", num_classes=7, layout=layout, **VIT).eval()
            iso.save(vit, tmp_path / f"{layout}.safetensors")
            model = detector().eval()
            iso.load_weights(model, tmp_path / f"{layout}.safetensors", fresh_head=True)
            tokens = torch.randn(5, 12)
            torch.testing.assert_close(
                model.backbone.blocks[0].mlp.fc1(tokens),
                vit.blocks[0].mlp.fc1(tokens),
                atol=1e-4,
                rtol=1e-4,
            )

    def test_a_detector_of_other_classes_keeps_all_but_its_last_layers(self, plain, tmp_path):
        iso.save(plain, tmp_path / "three.safetensors")
        other = detector(num_classes=5, backbone_kwargs={**VIT, "layout": "plain"})
        new = iso.load_weights(other, tmp_path / "three.safetensors", fresh_head=True)
        layers = {name.split(".")[-2] for name in new}
        assert layers == {"cls_score", "bbox_pred", "mask_fcn_logits"}
        torch.testing.assert_close(
            other.rpn.head.cls_logits.weight, plain.rpn.head.cls_logits.weight
        )


def test_boxes_read_the_map_of_their_size():
    pool = PyramidRoIAlign(7, (4, 8, 16, 32))
    maps = {str(i): torch.randn(2, 5, 256 // s, 256 // s) for i, s in enumerate((4, 8, 16, 32))}
    boxes = [
        torch.tensor([[3.0, 5, 90, 80], [0, 0, 250, 250]]),
        torch.tensor([[10.0, 10, 200, 120]]),
    ]
    assert pool.levels_of(torch.cat(boxes)).tolist() == [0, 2, 1]
    y = pool(maps, boxes)
    expected = roi_align(maps["2"], [boxes[0][1:], boxes[1][:0]], 7, 1 / 16, -1, aligned=True)
    torch.testing.assert_close(y[1:2], expected)


def test_boxes_on_bfloat16_maps_keep_their_coordinates():
    pool = PyramidRoIAlign(7, (4,))
    maps = {"0": torch.randn(1, 2, 256, 256).cumsum(2).bfloat16()}
    boxes = [torch.tensor([[701.3, 703.1, 741.9, 747.7]])]
    exact = pool({"0": maps["0"].float()}, boxes)
    torch.testing.assert_close(pool(maps, boxes), exact.bfloat16(), rtol=0, atol=0)


GATED = dict(rule=iso.AttentionToGPSA(), where="backbone.blocks.0.attn")
REFUSED = {
    "windows": (lambda plain: iso.recast(plain, **GATED), "DecomposedAttention"),
    "train mode": (
        lambda plain: detector(masks=False).detect(torch.zeros(1, 3, 32, 32)),
        "eval mode",
    ),
    "losses in eval mode": (lambda plain: plain(torch.zeros(1, 3, 32, 32), []), "train mode"),
    "weights": (
        lambda plain: backbone_state(plain, timm.create_model("cifar_resnet20").state_dict()),
        "not those of a",
    ),
    "blocks": (lambda plain: detector(global_blocks=[5]), "global_blocks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what, plain):
    call, message = REFUSED[what]
    with pytest.raises(iso.UserError, match=message):
        call(plain)


def test_boxes_are_in_float32_under_autocast(plain):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = plain(torch.randn(1, 3, 64, 64))
    assert {tensor.dtype for tensor in tree_leaves(out)} == {torch.float32}


def test_anchors_of_a_bfloat16_model_keep_their_coordinates():
    anchors = StrideAnchors((4.0,), 8.0)
    images = SimpleNamespace(image_sizes=[(1024, 1024)])
    (exact,) = anchors(images, [torch.zeros(1, 1, 256, 256)])
    (found,) = anchors(images, [torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16)])
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def plain_detector():
    return detector("vit_tiny_patch16_224", backbone_kwargs=VIT | dict(img_size=64))


@pytest.mark.parametrize(
    ("name", "prefix"), [("vit_tiny_patch16_224", 1), ("deit_tiny_distilled_patch16_224", 2)]
)
def test_positions_of_prefix_tokens_are_dropped(name, prefix):
    plain = timm.create_model(name, img_size=64, depth=1, embed_dim=12, num_heads=3)
    state = backbone_state(plain_detector(), plain.state_dict())
    positions = next(tensor for key, tensor in state.items() if key.endswith("pos_embed"))
    assert positions.shape[1] == 16
    assert torch.equal(positions, plain.pos_embed[:, prefix:])


def test_positions_of_rectangular_images_are_rejected():
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=(64, 128), depth=1, embed_dim=12, num_heads=3
    )
    refused(
        "do not fill a square of patches",
        backbone_state,
        plain_detector(),
        plain.state_dict(),
    )


def test_windows_of_the_backbone_are_measured():
    model = detector("vit_tiny_patch16_224", window=2, img_size=80).eval()
    distances = iso.nonlocality(model.backbone, torch.randn(1, 3, 80, 80))
    assert all(heads.isfinite().all() for heads in distances.values())
