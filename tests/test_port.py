"""Weights from one implementation to another: both directions of a table, and targets of another function."""

import copy
import json

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import isomorph as iso
import same_networks
from command_line import isomorph
from isomorph.surgery import NotPorted
from refusals import refused
from same_networks import IMAGE, PAIRS, VIT, OwnViT, give_random_weights, hf_vit, timm_vit

DIRECTIONS = ("to the second", "to the first")
# Pairs of full width, which take seconds: benchmarks/port_pairs.py runs all of them.
FULL_WIDTH = (
    "ResNet,",
    "ResNeXt",
    "RegNet",
    "Mobile",
    "Efficient",
    "MNASNet",
    "Inception",
    "Swin",
    "VGG",
)
# Pairs that differ in a setting that is not a weight: its name.
SETTINGS = {
    "ViT with eps 1e-12, timm and transformers": "eps",
    "DINOv3, timm and transformers": "constants rounded to",
    "SigLIP, timm and transformers": "gelu approximate",
    "PVT v2, timm and transformers": "eps",
    "ConvNeXt, timm and transformers": "eps",
    "ConvNeXt, torchvision and transformers": "eps",
    "ConvNeXt V2, timm and transformers": "eps",
    "EfficientNetV2, timm and torchvision": "eps",
    "MobileNetV3 large, timm and torchvision": "eps",
    "MobileNetV3 small, timm and torchvision": "eps",
    "SwiftFormer, timm and transformers": "operation",
}
# Pairs of functions that differ: where a norm stands, padding.
DIFFERENT = ("PoolFormer", "MaxViT")
ROWS = [
    pytest.param(name, way, marks=[pytest.mark.slow] if name.startswith(FULL_WIDTH) else [])
    for name in PAIRS
    for way in DIRECTIONS
    if not name.startswith(DIFFERENT)
]


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def make(name, way="to the second"):
    first, second, side = PAIRS[name]
    torch.manual_seed(0)
    pair = [first(), second()] if way == DIRECTIONS[0] else [second(), first()]
    return give_random_weights(pair[0]), pair[1].eval(), images(side)


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_weights_are_carried_in_both_directions(name, way):
    source, target, batch = make(name, way)
    before = copy.deepcopy(target.state_dict())
    report = iso.port_weights(source, target, batch, partial=True)
    for key, x in target.state_dict().items():
        assert torch.equal(x, before[key])
    if name in SETTINGS:
        assert not report.equal
        assert report.explained
        assert {setting.name for setting in report.settings} == {SETTINGS[name]}
        return
    assert report.equal, str(report)
    assert report.difference < 1e-12


def test_the_result_computes_what_the_source_computes():
    source, target, batch = make("ViT, timm and transformers")
    report = iso.port_weights(source, target, batch)
    with torch.no_grad():
        torch.testing.assert_close(report.model(batch).logits, source(batch), atol=1e-5, rtol=1e-5)
    ways = {way.target: way for way in report.tensors}
    assert ways["vit.layers.0.attention.k_proj.weight"].sources == ("blocks.0.attn.qkv.weight",)
    assert "a part" in ways["vit.layers.0.attention.k_proj.weight"].how


OWN = {
    "queries, keys, values": dict(),
    "keys first": dict(order="kqv"),
    "values first": dict(order="vkq"),
    "interleaved": dict(heads_first=False),
    "permuted channels": dict(shuffle=True),
}


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("way", DIRECTIONS)
def test_own_code_gets_and_gives_weights(form, way):
    pair = [timm_vit(), OwnViT(**OWN[form])]
    source, target = pair if way == DIRECTIONS[0] else pair[::-1]
    assert iso.port_weights(give_random_weights(source), target, images()).difference < 1e-12


class ReadsWeights(nn.Module):
    """Multi-head attention whose weights are read, by torch's module or written out."""

    def __init__(self, by_hand=False, average=True):
        super().__init__()
        self.by_hand = by_hand
        self.average = average
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        if self.by_hand:
            y, weights = self.attend(x)
        else:
            y, weights = self.attention(x, x, x, average_attn_weights=self.average)
        return y, weights

    def attend(self, x):
        joint = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias)
        q, k, v = joint.unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * 8**-0.5).softmax(-1)
        y = self.attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
        return y, weights.mean(1) if self.average else weights


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_the_weights_of_multi_head_attention_may_be_read(by_hand, average):
    source = give_random_weights(ReadsWeights(by_hand, average))
    tokens = torch.randn(2, 7, 24)
    assert iso.port_weights(source, ReadsWeights(not by_hand, average), tokens).difference < 1e-12


class BatchNormBefore(nn.Module):
    """Two blocks in the order norm, activation, convolution, or another."""

    def __init__(self, last=False):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1, bias=False) for c in (3, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 5)
        self.last = last

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x).relu()) if self.last else norm(conv(x)).relu()
        return self.head(x.mean((2, 3)))


OTHER_FUNCTIONS = {
    "one more block": (timm_vit, lambda: timm_vit(depth=3)),
    "one block less": (timm_vit, lambda: timm_vit(depth=1)),
    "one block less, no head": (
        lambda: timm_vit(num_classes=0),
        lambda: timm_vit(depth=1, num_classes=0),
    ),
    "another activation": (timm_vit, lambda: OwnViT(act=F.silu)),
    "another number of heads": (timm_vit, lambda: timm_vit(num_heads=4)),
    "norms of queries and keys": (timm_vit, lambda: timm_vit(qk_norm=True)),
    "norm after the activation": (BatchNormBefore, lambda: BatchNormBefore(last=True)),
    "another eps": (timm_vit, lambda: OwnViT(eps=1e-3)),
    "patches read in another order": (timm_vit, lambda: Transposed(timm_vit())),
}


class Transposed(nn.Module):
    """A model that reads its images turned, and rows of patches as columns."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.mT.flip(1) * 1.1)


@pytest.mark.parametrize("case", OTHER_FUNCTIONS)
def test_another_function_is_never_called_equal(case):
    first, second = OTHER_FUNCTIONS[case]
    source = give_random_weights(first())
    with pytest.raises(NotPorted) as error:
        iso.port_weights(source, second(), images())
    report = error.value.report
    assert not report.equal
    assert "NOT equal" in str(report)


class Shifted(nn.Module):
    """A norm with another number added, which is not a weight."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) + 0.1


def with_more(model):
    model.layers[0]["a"] = Shifted(model.layers[0]["a"])
    return model


NAMED = {  # a target, its setting and value, and whether that alone makes it another function
    "gelu": (lambda: OwnViT(act=F.silu), "operation", "silu", True),
    "eps": (lambda: OwnViT(eps=1e-3), "eps", 1e-3, True),
    "heads": (lambda: timm_vit(num_heads=4), "heads or windows of attention", 4, False),
    "eps and a constant": (lambda: with_more(OwnViT(eps=1e-3)), "eps", 1e-3, False),
    "eps and the order of pixels": (lambda: Transposed(OwnViT(eps=1e-3)), "eps", 1e-3, False),
}


@pytest.mark.parametrize("case", NAMED)
def test_settings_that_are_not_weights_are_named_and_tried(case):
    make_target, name, value, alone = NAMED[case]
    report = iso.port_weights(give_random_weights(timm_vit()), make_target(), images(), True)
    assert not report.equal
    assert report.explained is alone
    assert (name, value) in [(setting.name, setting.target) for setting in report.settings]


class Chain(nn.Module):
    """Linear layers, of which one may be left out."""

    def __init__(self, leaves_out=False):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.c = nn.Linear(6, 4)
        self.leaves_out = leaves_out

    def forward(self, x):
        return self.c(self.b(x if self.leaves_out else self.a(x)))


def test_a_place_without_operations_before_it_does_not_list_them():
    torch.manual_seed(0)
    report = iso.port_weights(Chain(), Chain(True), torch.randn(2, 6), partial=True)
    assert "the layer reads other values" in [place.what for place in report.places]
    assert "nothing in the source, nothing in the target" not in str(report)


def test_heads_that_one_side_has_are_said():
    source = give_random_weights(timm_vit(num_classes=0))
    target = timm_vit()
    report = iso.port_weights(source, target, images())
    assert report.kept == ("head.weight", "head.bias")
    assert torch.equal(report.model.head.weight, target.head.weight)
    back = iso.port_weights(give_random_weights(timm_vit()), timm_vit(num_classes=0), images())
    assert back.left == ("head.weight", "head.bias")


def test_a_scale_that_one_side_has_is_merged_or_one():
    scaled = timm_vit(init_values=0.1)
    merged = iso.port_weights(give_random_weights(scaled), timm_vit(), images())
    assert merged.equal
    assert merged.left == ()
    report = iso.port_weights(give_random_weights(timm_vit()), scaled, images())
    assert bool((report.model.blocks[0].ls1.gamma == 1).all())


class ScaledByProduct(nn.Module):
    """A linear layer whose outputs are multiplied by the product of two parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first = nn.Parameter(torch.rand(4) + 0.5)
        self.second = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        return self.linear(x) * (self.first * self.second)


def test_a_product_of_parameters_that_only_the_target_has_is_one():
    report = iso.port_weights(nn.Sequential(nn.Linear(4, 4)), ScaledByProduct(), torch.randn(2, 4))
    assert report.equal
    assert (report.model.first * report.model.second == 1).all()


def test_a_bias_that_the_target_lacks_is_never_lost_silently():
    source = timm_vit()
    target = timm_vit(qkv_bias=False)
    nn.init.zeros_(source.blocks[0].attn.qkv.bias)
    nn.init.zeros_(source.blocks[1].attn.qkv.bias)
    assert iso.port_weights(source, target, images()).equal
    with pytest.raises(NotPorted, match=r"blocks\.0\.attn\.qkv: the target has no bias there"):
        iso.port_weights(give_random_weights(source), target, images())


def without_patch_bias(**kwargs):
    vit = timm_vit(**kwargs)
    vit.patch_embed.proj.bias = None
    return vit


class AddsBefore(nn.Module):
    """Patches without a bias, an activation, and only then positions."""

    def __init__(self, bias):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8, bias=bias)
        self.places = nn.Parameter(torch.zeros(16, 8))

    def forward(self, x):
        return self.patches(x).flatten(2).mT.relu() + self.places


def test_a_bias_that_the_target_lacks_goes_into_positions_where_that_is_exact():
    source = give_random_weights(timm_vit())
    report = iso.port_weights(source, without_patch_bias(), images())
    assert report.equal
    assert report.left == ()
    expected = source.pos_embed[:, 1:] + source.patch_embed.proj.bias
    torch.testing.assert_close(report.model.pos_embed[:, 1:], expected)
    with pytest.raises(NotPorted, match="patches: the target has no bias there"):
        iso.port_weights(give_random_weights(AddsBefore(True)), AddsBefore(False), images())


class Branches(nn.Module):
    """Residual blocks with a convolution in the shortcut, which is computed first or last, and a head."""

    def __init__(self, shortcut_first, head):
        super().__init__()
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))
        self.head = nn.Linear(8, 5) if head else nn.Identity()
        self.shortcut_first = shortcut_first

    @staticmethod
    def make_block():
        shortcut = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        last = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        return nn.ModuleDict({"shortcut": shortcut, "main": nn.Sequential(first, last)})

    def forward(self, x):
        for block in self.blocks:
            if self.shortcut_first:
                shortcut = block["shortcut"](x)
                x = (block["main"](x) + shortcut).relu()
            else:
                main = block["main"](x)
                x = (main + block["shortcut"](x)).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("head", [True, False])
def test_the_order_of_branches_does_not_matter(head):
    source = give_random_weights(Branches(True, head))
    x = torch.randn(2, 8, 6, 6)
    report = iso.port_weights(source, Branches(False, True), x)
    ways = {way.target: way.sources for way in report.tensors}
    assert ways["blocks.1.shortcut.0.weight"] == ("blocks.1.shortcut.0.weight",)
    assert report.ambiguous == ()


class Gated(nn.Module):
    """A gate and a value by layers, or scales, of one size; only the gate has an activation."""

    def __init__(self, layers, gate_first):
        super().__init__()
        self.gate = nn.Linear(8, 6) if layers else nn.Parameter(torch.ones(8))
        self.value = nn.Linear(8, 6) if layers else nn.Parameter(torch.ones(8))
        self.out = nn.Linear(6 if layers else 8, 5)
        self.layers = layers
        self.gate_first = gate_first

    def forward(self, x):
        names = ["gate", "value"] if self.gate_first else ["value", "gate"]
        parts = {}
        for name in names:
            part = getattr(self, name)
            parts[name] = part(x) if self.layers else x * part
        return self.out(F.silu(parts["gate"]) * parts["value"])


@pytest.mark.parametrize("layers", [True, False])
def test_what_structure_cannot_tell_is_tried_and_named(layers):
    source = give_random_weights(Gated(layers, True))
    report = iso.port_weights(source, Gated(layers, False), torch.randn(2, 8))
    assert len(report.ambiguous) == 1
    ways = {way.target: way.sources for way in report.tensors}
    name = "gate.weight" if layers else "gate"
    assert ways[name] == (name,)


class Follows(nn.Module):
    """A model that computes something else where a bias is large, or outside of torch's functions."""

    def __init__(self, by_numpy):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.ones(1))
        self.by_numpy = by_numpy

    def forward(self, x):
        y = self.layer(x)
        if self.by_numpy:
            y = torch.from_numpy(y.detach().numpy() * 2)
        elif self.layer.bias.sum() > 5:
            y = y * self.gate
        return y + 1


@pytest.mark.parametrize("by_numpy", [True, False])
def test_models_that_cannot_be_followed_are_an_error(by_numpy):
    torch.manual_seed(0)
    source = Follows(by_numpy)
    with torch.no_grad():
        source.layer.bias.fill_(1)
        source.gate.fill_(3)
    batch = torch.randn(2, 8)
    refused("cannot be followed", iso.port_weights, source, Follows(by_numpy), batch)


class InPlace(nn.Module):
    """A model that writes into what it has computed, and into parts of it."""

    def __init__(self, in_place):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(4, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.in_place = in_place

    def forward(self, x):
        y = self.one(x)
        if not self.in_place:
            first = (y[:, :4] * 2).relu()
            y = torch.cat([first, y[:, 4:]], 1)
            return self.two(y[:, :4]) * y + self.shift
        first = y[:, :4]
        first.mul_(2).relu_()
        z = self.two(first)
        z *= y
        z += self.shift
        return z


@pytest.mark.parametrize("in_place", [True, False])
def test_operations_in_place_are_run_again_as_they_were(in_place):
    torch.manual_seed(0)
    source = give_random_weights(InPlace(in_place))
    batch = torch.randn(2, 8)
    report = iso.port_weights(source, InPlace(not in_place).eval(), batch)
    torch.testing.assert_close(report.model(batch), source(batch))


class Rectified(nn.Module):
    """A layer half of whose outputs are rectified, also in place, and a layer that reads all of them."""

    def __init__(self, in_place):
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.two = nn.Linear(8, 3)
        self.in_place = in_place

    def forward(self, x):
        y = self.one(x)
        if self.in_place:
            y[:, :4].relu_()
            return self.two(y)
        return self.two(torch.cat([y[:, :4].relu(), y[:, 4:]], 1))


@pytest.mark.parametrize("in_place", [True, False])
def test_operations_that_leave_some_numbers_as_they_are_do_not_only_move_them(in_place):
    """Half of so few numbers are negative in any order, also in that of the names of entries."""
    for seed in range(24):
        torch.manual_seed(seed)
        source = give_random_weights(Rectified(in_place))
        batch = torch.randn(1, 6)
        report = iso.port_weights(source, Rectified(not in_place).eval(), batch)
        assert report.difference < 1e-12


class WritesAfterAView(nn.Module):
    """A model that writes in place to a tensor after it has taken views of it."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x)
        part = y[:, 2:6]
        every_third = y[:, ::3]
        y[:, :4] = y[:, :4] + self.two(part)
        return torch.cat([y, part, every_third], 1)


def test_a_view_has_what_is_written_to_its_memory():
    source = give_random_weights(WritesAfterAView())
    batch = torch.randn(2, 8)
    report = iso.port_weights(source, WritesAfterAView().eval(), batch)
    torch.testing.assert_close(report.model(batch), source(batch))


SIZES = {  # a source, a target of another size, and the size of the images that one of them takes
    "a larger target": (timm_vit, lambda: timm_vit(img_size=48), 32),
    "a larger target, from transformers": (hf_vit, lambda: timm_vit(img_size=48), 32),
    "a target of other patches": (hf_vit, lambda: timm_vit(img_size=48, patch_size=12), 32),
    "a larger source": (lambda: timm_vit(img_size=48), hf_vit, 32),
}


@pytest.mark.parametrize("case", SIZES)
def test_models_for_other_images_are_resized_and_that_is_said(case):
    make_source, make_target, side = SIZES[case]
    source = give_random_weights(make_source())
    target = make_target().eval()
    report = iso.port_weights(source, target, images(side))
    assert report.equal
    assert "not exact; outputs on these images move by" in report.notes[-1]
    own = {name: x.shape for name, x in target.state_dict().items()}
    assert {name: x.shape for name, x in report.model.state_dict().items()} == own


def test_models_for_other_images_that_cannot_be_resized_are_an_error():
    small = torchvision.models.VisionTransformer(48, 8, 2, 3, 24, 48, num_classes=5)
    refused("set_input_size", iso.port_weights, hf_vit(), small, images())


class ReadsPositions(nn.Module):
    """A table of positions that is read by a layer or by a product with its exponential, with a gate."""

    def __init__(self, by_layer):
        super().__init__()
        self.gates = nn.Parameter(torch.randn(4))
        self.layer = nn.Linear(8, 4)
        self.by_layer = by_layer
        if by_layer:
            self.table = nn.Linear(3, 4)
        else:
            self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer(
            "places", torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, x):
        scores = (
            self.table(self.places).T
            if self.by_layer
            else (self.table[:, None] * self.places).sum(-1)
        )
        weights = scores.softmax(-1) * self.gates.sigmoid()[:, None]
        return self.layer(x).mT @ weights.T


@pytest.mark.parametrize("by_layer", [True, False])
def test_parameters_that_both_read_in_another_way_are_tried(by_layer):
    torch.manual_seed(0)
    source = ReadsPositions(by_layer)
    report = iso.port_weights(source, ReadsPositions(not by_layer), torch.randn(2, 6, 8))
    ways = {way.target: way.sources for way in report.tensors}
    table = {True: "table.weight", False: "table"}
    assert ways[table[not by_layer]] == (table[by_layer],)
    assert any("another way" in each for each in report.ambiguous)


def test_images_are_required():
    refused("empty", iso.port_weights, timm_vit(), timm_vit(), torch.zeros(0, 3, 32, 32))


def test_pairs_are_narrow():
    assert VIT["hidden_size"] == same_networks.WIDTH
    assert hf_vit().config.image_size == IMAGE["image_size"]


@pytest.mark.parametrize(
    "name", ["PoolFormer, timm and transformers", "MaxViT, timm and torchvision"]
)
def test_implementations_of_other_functions_are_named(name):
    source, target, batch = make(name)
    report = iso.port_weights(source, target, batch, partial=True)
    assert not report.equal
    assert not report.explained
    assert report.places


def test_outputs_that_the_source_does_not_compute_are_said():
    source, target, batch = make("DINOv3 ConvNeXt, timm and transformers")
    report = iso.port_weights(source, target, batch)
    assert any("last_hidden_state, which is not compared" in note for note in report.notes)


class Cached(nn.Module):
    """A model that keeps a table that it reads from a parameter, until it is trained again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.zeros(8))
        self.kept = {}

    def train(self, mode=True):
        self.kept.clear()
        return super().train(mode)

    def forward(self, x):
        if "table" not in self.kept:
            self.kept["table"] = self.table.exp()
        return self.layer(x) * self.kept["table"]


def test_caches_of_eval_mode_do_not_hide_weights():
    source = give_random_weights(Cached())
    batch = torch.randn(2, 8)
    target = Cached().eval()
    with torch.no_grad():
        target(batch)
    report = iso.port_weights(source, target, batch)
    torch.testing.assert_close(report.model(batch), source(batch))


@pytest.mark.slow
def test_the_command_writes_a_model_and_its_report(tmp_path):
    out = tmp_path / "new.safetensors"
    source = tmp_path / "old.safetensors"
    cnn = timm.create_model("cifar_resnet20", num_classes=5).eval()  # the target gets as many
    iso.save(cnn, source)
    done = isomorph("port", source, "cifar_resnet20", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["equal"]
    x = images()
    torch.testing.assert_close(iso.load(out).eval()(x), cnn(x))
    other = isomorph("port", source, "cifar_resnet32", "--out", tmp_path / "other.safetensors")
    assert other.returncode == 2
    assert "NOT equal" in other.stderr
    assert "--partial" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1
    assert "\n  note: of the target alone:" in other.stdout
    assert not (tmp_path / "other.safetensors").exists()


def test_a_target_file_that_names_no_model_gets_advice_that_works(tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("cifar_resnet20").state_dict(), file)
    done = isomorph("port", "cifar_resnet20", file, "--out", tmp_path / "new.safetensors")
    assert done.returncode == 2
    assert "its weights are not read: give a model of timm" in done.stderr.splitlines()[-1]


def test_the_shift_between_sizes_is_that_of_eval_mode():
    notes = []
    for training in (False, True):
        torch.manual_seed(0)
        source = give_random_weights(timm_vit(drop_rate=0.5))
        source.train(training)
        target = timm_vit(img_size=48).eval()
        notes.append(iso.port_weights(source, target, images(32)).notes[-1])
    assert "move by" in notes[0]
    assert notes[0] == notes[1]
