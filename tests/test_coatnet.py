"""The CoAtNets: published sizes, every layout of the paper, any image, tables that follow, and timm's own CoAtNets."""

import json

import pytest
import timm
import torch

import isomorph as iso
from isomorph.analysis.cost import count_macs
from isomorph.checkpoints.model import describe_model, write_model
from isomorph.lab.training.build import build_model
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.layers import MBConv, RelativeAttention
from isomorph.models.coatnet import CoAtNet, checkpoint_filter_fn, parse_layout, split_layout

GMACS = {0: 4.2, 1: 8.4, 2: 15.7, 3: 34.7}
STRIDED_DEPTHWISE = {0: 4.6, 1: 8.8, 2: 16.6}  # Table 9
TINY = dict(
    depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 16, 32), head_dim=8, num_classes=5, img_size=64
)


def tiny(seed=0, **kwargs):
    torch.manual_seed(seed)
    return CoAtNet(**(TINY | kwargs))


def settled(model):
    """Norms and tables anywhere but where they are born."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, RelativeAttention):
            torch.nn.init.normal_(module.relative_bias)
    return model.eval()


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


class TestPublishedSizes:
    @pytest.mark.parametrize(
        ("stride_on", "expected"), [("expand", GMACS), ("depthwise", STRIDED_DEPTHWISE)]
    )
    def test_macs(self, stride_on, expected):
        for size, giga in expected.items():
            found = count_macs(on_meta(f"coatnet_{size}", stride_on=stride_on), (3, 224, 224)) / 1e9
            assert found == pytest.approx(giga, rel=0.025)

    def test_mixed_stages_and_heads(self):
        stage = on_meta("coatnet_7").stages[3]
        assert [type(block).__name__ for block in stage] == ["MBConv"] * 8 + [
            "TransformerBlock"
        ] * 42
        assert stage[8].norm1.normalized_shape == (1024,)
        assert stage[8].attn.proj.out_features == 2048
        assert stage[8].attn.head_dim == 128

    def test_the_printed_counts_ask_for_a_hidden_layer_in_the_head(self):
        """Tables 4 and 5: six of eight round to print with it, one without it (docs/decisions/019)."""
        printed = (25, 42, 75, 168, 275, 688, 1470, 2440)
        rounds = {True: [], False: []}
        for number, millions in enumerate(printed):
            step = 10 if millions > 1000 else 1
            for hidden, agreeing in rounds.items():
                model = on_meta(f"coatnet_{number}", head_hidden=hidden)
                count = sum(p.numel() for p in model.parameters()) / 1e6
                if step * round(count / step) == millions:
                    agreeing.append(number)
        assert rounds == {True: [0, 1, 2, 4, 6, 7], False: [1]}

    def test_coatnet_6_as_printed_falls_short(self):
        """Why coatnet_6 is 3072 wide at its end (docs/decisions/007)."""
        printed = on_meta("coatnet_6", widths=(192, 192, 384, 768, 1536, 2048))
        assert sum(p.numel() for p in printed.parameters()) / 1e6 < 0.92 * 1470


@pytest.mark.parametrize(
    "form",
    [
        *(dict(layout=layout) for layout in ("C-C-C-C", "C-C-C-T", "C-T-T-T", "T-T-T-T")),
        *(
            dict(norm="layer"),
            dict(stride_on="depthwise"),
            dict(relative="post"),
            dict(relative="none"),
        ),
        dict(head_dim=16),
        dict(stem_stride=1, layout="SC-C-T-T"),
        dict(layout="C-C-CT-T", depths=(2, 1, 1, 2, 2, 1), widths=(8, 8, 16, 16, 24, 32)),
        dict(layout="PT", depths=(1, 2), widths=(32, 32), patch_size=8),
    ],
    ids=str,
)
def test_forms_learn(form):
    model = tiny(drop_path_rate=0.1, drop_rate=0.1, **form)
    model(torch.randn(2, 3, 40, 70)).square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()


class TestLayout:
    def test_paper_and_written_out(self):
        paper = parse_layout("C-C-T-T", (2, 1, 1, 1, 1), (8,) * 5)
        written = parse_layout("S-C-C-T-T", (2, 1, 1, 1, 1), (8,) * 5)
        assert paper == written
        resolutions = {"C-C-T-T": 5, "S-C-C-T-T": 5, "SC-C-T-T": 4, "C-C-CT-T": 5, "PT": 1}
        assert {name: len(split_layout(name)) for name in resolutions} == resolutions

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (dict(layout="C-C-X-T"), "is invalid"),
            (dict(layout="C-C-T"), "with its stem has 4 letters"),
            (dict(depths=(3, 1, 1, 1, 1)), "must begin with 2"),
            (dict(widths=(8, 8, 16, 16, 20)), "head_dim 8 does not divide the width 20"),
            (dict(norm="group"), "choose 'batch' or 'layer'"),
            (dict(relative="both"), "choose 'pre' or 'post' or 'none'"),
        ],
        ids=str,
    )
    def test_what_cannot_be_built_is_said(self, wrong, message):
        with pytest.raises(iso.UserError, match=message):
            tiny(**wrong)


def test_pruned():
    model = tiny()
    assert model.prune_intermediate_layers([0, 2]) == [0, 2]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 16, 8, 8)
    assert model.num_classes == 0
    assert model.num_features == 16
    assert model.head_hidden_size == 16
    model.set_input_size(96)


def test_tables_follow_the_size_of_the_image():
    """Read at every call, resized in place, or from a checkpoint of another size: the same."""
    model = settled(tiny())
    other = tiny(seed=1, img_size=(96, 128))
    x = torch.randn(2, 3, 96, 128)
    given = {
        "state_dict": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    }
    other.load_state_dict(checkpoint_filter_fn(given, other))
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(other.eval()(x), expected)
        model.set_input_size((96, 128))
        torch.testing.assert_close(model(x), expected)
    assert model.stages[3][0].attn.grid_size == (6, 8)


@pytest.mark.parametrize(
    "where", ["stages.*.expand", "stages.*.depthwise", "stages.1.0.se.fc?", "stem.conv?"]
)
def test_fused_after_pyramids(where):
    """What was recast inside a block is fused with it."""
    model = settled(tiny())
    wide = iso.recast(model, iso.LinearToPyramid(), where)
    fused = iso.fuse(wide.eval())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-3)
    for m in fused.modules():
        assert not (isinstance(m, torch.nn.BatchNorm2d | MBConv))
        assert "Pyramid" not in type(m).__name__


def test_logits_include_the_table():
    model = settled(tiny())
    x = torch.randn(2, 3, 64, 64)
    before = iso.analysis.logit_stats(model, x)["stages.3.0.attn"]
    with torch.no_grad():
        model.stages[3][0].attn.relative_bias.add_(100)
    after = iso.analysis.logit_stats(model, x)["stages.3.0.attn"]
    torch.testing.assert_close(after.max_logit, before.max_logit + 100, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(after.entropy, before.entropy, rtol=1e-3, atol=1e-3)


def from_timm(state):
    """Tensors of timm's coatnet_N under our names; its queries, keys and values stand head by head."""
    found = {}
    for name, tensor in state.items():
        name = (
            name.replace("stem.norm1", "stem.norm")
            .replace("conv1_1x1", "expand")
            .replace("conv2_kxk", "depthwise")
        )
        name = (
            name.replace("conv3_1x1", "project")
            .replace("pre_norm", "norm")
            .replace("norm1.norm", "norm1")
        )
        name = name.replace("shortcut.expand", "shortcut.1").replace(".blocks.", ".")
        if name.startswith("stages."):
            _, stage, rest = name.split(".", 2)
            name = f"stages.{int(stage) + 1}.{rest}"
        if "relative_position_bias_table" in name:
            side = int(len(tensor) ** 0.5)
            name = name.replace("rel_pos.relative_position_bias_table", "relative_bias")
            tensor = tensor.T
            tensor = tensor.unflatten(1, (side, side))
        if ".attn." in name or ".mlp." in name:
            tensor = tensor.flatten(1) if tensor.ndim == 4 else tensor
        if ".qkv." in name:
            tensor = tensor.unflatten(0, (-1, 3, 32)).transpose(0, 1).flatten(0, 2)
        found[name] = tensor
    return found


@pytest.mark.parametrize("dw", [False, True])
def test_configured_alike_timm_and_we_compute_the_same(dw):
    """Max pooling of 2 x 2, GELU in the SE: the same features from the same tensors."""
    alike = dict(conv_pool_type="max2", transformer_pool_type="max2", conv_attn_act_layer="gelu")
    sizes = dict(depths=(1, 2, 2, 1), embed_dim=(32, 32, 64, 64), stem_width=16, img_size=64)
    torch.manual_seed(0)
    sizes |= dict(head_hidden_size=64, num_classes=7)
    theirs = timm.create_model(
        "coatnet_0_224", conv_stride_mode="dw" if dw else "1x1", **alike, **sizes
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    stride_on = "depthwise" if dw else "expand"
    widths = dict(depths=(2, 1, 2, 2, 1), widths=(16, 32, 32, 64, 64))
    ours = CoAtNet(**widths, stride_on=stride_on, img_size=64, num_classes=7)
    ours.load_state_dict(from_timm(theirs.state_dict()))
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    for training in (False, True):
        theirs = theirs.double().train(training)
        ours = ours.double().train(training)
        torch.testing.assert_close(
            ours.forward_features(x), theirs.forward_features(x), rtol=0, atol=1e-10
        )
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)


HEADS = dict(depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 16, 32), head_dim=8, img_size=64)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("how", ["saved", "saved with base", "reset", "trained", "fused"])
def test_the_head_is_recorded_and_comes_back(hidden, how, tmp_path):
    """With and without the hidden layer, however the record was made."""
    path = tmp_path / "model.safetensors"
    model = settled(timm.create_model("coatnet_0", num_classes=4, head_hidden=hidden, **HEADS))
    base = dict(name="coatnet_0", num_classes=4, **HEADS) if how == "saved with base" else None
    if how == "reset":
        model.reset_classifier(3)
    elif how == "trained":
        part = ModelPart(
            name="coatnet_0", kwargs=HEADS if hidden else HEADS | dict(head_hidden=False)
        )
        model = build_model(part, 4).eval()
    elif how == "fused":
        model = iso.fuse(model)
    iso.save(model, path, base)
    opened = iso.load(path)
    assert opened.head_hidden == hidden
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(opened(x), model(x))


def test_records_from_before_the_hidden_layer_open(tmp_path):
    """A record that leaves the argument out was written when there was no hidden layer."""
    old = tmp_path / "old.safetensors"
    x = torch.randn(2, 3, 64, 64)
    model = settled(timm.create_model("coatnet_0", num_classes=4, head_hidden=False, **HEADS))
    header = describe_model(model)
    base = json.loads(header["base"])
    assert base.pop("head_hidden") is False
    write_model(header | {"base": json.dumps(base)}, model.state_dict(), old)
    opened = iso.load(old)
    torch.testing.assert_close(opened(x), model(x))
    again = tmp_path / "again.safetensors"
    iso.save(opened, again)
    torch.testing.assert_close(iso.load(again)(x), model(x))
    recipe = iso.load_recipe("digits_cnn", [f"model.weights={old}", "model.name=null"])
    assert build_model(recipe.model, 10).head_hidden is False
