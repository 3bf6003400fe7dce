"""A block after any module: equal bit by bit at first, saved, rebuilt and removed; wrong places are refused."""

import copy
import pickle
import re
from functools import partial

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import isomorph as iso
from isomorph.layers import MapAttention
from isomorph.layers.map_attention import InsertedBlock
from isomorph.surgery.insert import BLOCKS, register_block
from refusals import refused

X = torch.randn(1, 3, 64, 64)


class Own(nn.Module):
    """Outputs of several kinds, a layer in place, a module used twice, children that are iterated over."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.steps = Steps()
        self.line = nn.Conv1d(8, 8, 1)
        self.pyramid = Pyramid()

    def forward(self, x):
        h = self.act(self.conv(self.act(self.conv(self.stem(x)))))
        h = self.pyramid(self.steps(h))["map"]
        t, _ = self.lstm(self.line(h.flatten(2))[..., :9].mT)
        return F.linear(t.mean(1), self.head.weight, self.head.bias)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(8, 8, 1)
        self.b = nn.Tanh()

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


class Pyramid(nn.Module):
    def forward(self, x):
        return {"map": x * 1, "pool": x.mean((2, 3))}


def conv_block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 1), nn.GELU())


def backbone(name, **kwargs):
    return lambda: timm.create_model(name, **kwargs)


PLACES = {
    "features only": (backbone("resnet18", features_only=True), "layer3.1", conv_block),
    "channels last": (backbone("convnext_atto"), "stages.1.blocks.0.norm", conv_block),
    "channels last, by layout": (
        backbone("swin_tiny_patch4_window7_224", img_size=64, depths=(1, 1), num_heads=(3, 6)),
        "layers.1.blocks.0",
        conv_block,
    ),
    "tokens": (backbone("vit_tiny_patch16_224", img_size=64, depth=2), "blocks.?", MapAttention),
    "own, used twice": (Own, "conv", conv_block),
    "own, a tuple": (Own, "lstm", lambda channels: nn.Linear(channels, channels)),
    "own, a dictionary": (Own, "pyramid", conv_block),
}


@pytest.fixture(params=PLACES)
def inserted(request):
    make, after, block = PLACES[request.param]
    torch.manual_seed(0)
    model = make().eval()
    return model, iso.insert(model, block, after, example=X).eval()


def outputs(model):
    found = model(X)
    return found if isinstance(found, list) else [found]


def set_gammas(model, value=0.5):
    for module in model.modules():
        if isinstance(module, InsertedBlock):
            nn.init.constant_(module.gamma, value)
    return model


def test_equal_bit_by_bit_then_it_acts_and_goes(inserted):
    model, new = inserted
    for a, b in zip(outputs(model), outputs(new), strict=True):
        assert torch.equal(a, b)
    assert model.state_dict().keys() <= new.state_dict().keys()
    new.load_state_dict(model.state_dict(), strict=False)
    sum(each.square().sum() for each in outputs(new)).backward()
    gammas = [m.gamma for m in new.modules() if isinstance(m, InsertedBlock)]
    assert gammas
    for gamma in gammas:
        assert gamma.grad is not None
        assert gamma.grad.any()
    back = iso.revert(new)
    assert back.state_dict().keys() == model.state_dict().keys()
    assert {type(m) for m in back.modules()} == {type(m) for m in model.modules()}
    assert not iso.edits(back)
    moved = set_gammas(copy.deepcopy(new))
    assert any(not torch.equal(a, b) for a, b in zip(outputs(model), outputs(moved), strict=True))
    for gamma in iso.analysis.gammas(moved).values():
        assert torch.equal(gamma.abs(), torch.full_like(gamma, 0.5))
    refused("its gamma is up to 0.5; keep it, or remove it with atol 1", lambda: iso.revert(moved))
    assert iso.revert(moved, atol=1.0).state_dict().keys() == model.state_dict().keys()


def test_inserted_attention_is_drawn_on_its_map_and_its_gamma_is_named():
    """Uniform attention over a map of 2 x 3: the mean distance is known, and not that of 3 x 2."""
    model = timm.create_model("resnet18", zero_init_last=False).eval()
    new = iso.insert(model, iso.layers.MapAttention, "layer4.1", torch.randn(1, 3, 64, 96))
    nn.init.zeros_(new.layer4[1].inserted.block.attn.qkv.weight)
    x = torch.randn(2, 3, 64, 96)
    name = "layer4.1.inserted.block.attn"
    seen = iso.analysis.attention_from(new, x, (0, 0.9))[name]
    assert torch.allclose(seen, torch.full((2, 8, 2, 3), 1 / 6))
    points = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0))
    assert torch.allclose(
        iso.nonlocality(new, x)[name], torch.cdist(points, points).mean().expand(8)
    )
    refused("inserted blocks: iso.analysis.gammas", lambda: iso.gates(new))
    # inside the module with the block, too
    both = iso.recast(new, iso.ConvToGPSA(), where="layer4.*.conv2")
    assert (repr(back := iso.revert(both)), iso.edits(back)) == (repr(iso.revert(new)), ())
    # a block stays with its layer
    for rule, way in ((iso.ConvToGPSA(), iso.prune), (iso.LinearToPyramid(), iso.fuse)):
        acting = iso.insert(
            iso.recast(new, rule, "layer3.1.conv2").eval(),
            iso.layers.MapAttention,
            "layer3.1.conv2",
        )
        off = acting(x)
        set_gammas(acting)
        assert (acting(x) - off).abs().max() > 1e-2  # the block is seen in the output
        torch.testing.assert_close(way(acting)(x), acting(x), atol=1e-3, rtol=1e-3)
    square = iso.insert(
        timm.create_model("cifar_resnet20").eval(), iso.layers.MapAttention, "layer2.0.conv1"
    )
    assert len(square.layer2[0].conv1.inserted.gamma) == 32  # of a map of 16 x 16
    refused("no inserted block", lambda: iso.analysis.gammas(iso.revert(new)))
    refused(
        "after='layer9' matches no module; nearest names: layer4",
        lambda: iso.insert(new, nn.Identity(), "layer9"),
    )
    refused(
        "'MapAttention' is not callable", lambda: iso.insert(new, "MapAttention", after="layer3.1")
    )


def test_a_block_sees_channels_first_and_each_has_its_gamma():
    x = torch.randn(2, 4, 4, 4)
    for layout, axis in (("map", 1), ("map, channels last", -1), ("tokens", -1)):
        block = InsertedBlock(
            nn.Identity() if layout == "tokens" else nn.Conv2d(4, 4, 1, groups=4), 4, layout
        )
        block.gamma.data.copy_(torch.arange(4.0))
        y = block(x).movedim(axis, 0)
        given = x.movedim(axis, 1)
        wanted = given + (block.gamma * block.block(given).movedim(1, -1)).movedim(-1, 1)
        torch.testing.assert_close(y, wanted.movedim(1, 0))
    attention = MapAttention(8)
    tokens = torch.randn(2, 12, 8)
    torch.testing.assert_close(
        attention(tokens.mT.unflatten(2, (3, 4))).flatten(2).mT, attention(tokens)
    )


def test_pickle_export_and_compile():
    model = timm.create_model("resnet18").eval()
    new = set_gammas(iso.insert(model, MapAttention, "layer3.1"))
    exported = torch.export.export(new, (X,)).module()
    compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
    assert torch.equal(pickle.loads(pickle.dumps(new))(X), new(X))
    torch.testing.assert_close(exported(X), new(X))
    torch.testing.assert_close(compiled(X), new(X))
    _, features = new.forward_intermediates(X)
    assert len(features) == 5


@pytest.mark.parametrize("block", [MapAttention, conv_block])
def test_saved_and_rebuilt(block, tmp_path):
    model = timm.create_model("cifar_resnet20", num_classes=10).eval()
    new = set_gammas(iso.insert(model, block, "layer3.2"))
    iso.save(new, tmp_path / "new.safetensors")
    loaded = iso.load(tmp_path / "new.safetensors").eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), new(x))
    name = iso.edits(new)[0].rule.block
    known = BLOCKS.pop(name)
    try:
        refused(
            f"the block {name} is not registered", lambda: iso.load(tmp_path / "new.safetensors")
        )
    finally:
        register_block(known, name)


def local_block():
    def block(channels):
        return nn.Conv2d(channels, channels, 1)

    return block


WITHOUT_NAME = {
    "a module": lambda: nn.Conv2d(64, 64, 1),
    "a lambda": lambda: lambda channels: nn.Conv2d(channels, channels, 1),
    "a local function": local_block,
    "a partial function": lambda: partial(nn.Conv2d, 64, kernel_size=1),
}


@pytest.mark.parametrize("kind", WITHOUT_NAME)
def test_saving_a_block_without_a_name_warns_with_advice_that_works(kind, tmp_path):
    model = timm.create_model("cifar_resnet20", num_classes=10).eval()
    new = set_gammas(iso.insert(model, WITHOUT_NAME[kind](), "layer3.2"))
    with pytest.warns(UserWarning, match="after layer3.2 is a module, lambda or local") as warned:
        iso.save(new, tmp_path / "new.safetensors")
    assert warned[0].filename == __file__
    name = re.search(r'name="(.*)"\)', str(warned[0].message))[1]
    BLOCKS.pop(name)  # as in another process
    refused(f'name="{name}"', lambda: iso.load(tmp_path / "new.safetensors"))
    register_block(WITHOUT_NAME["a lambda"](), name)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(iso.load(tmp_path / "new.safetensors")(x), new(x))


def test_lambdas_of_one_file_are_different_blocks(tmp_path):
    model = timm.create_model("cifar_resnet20", num_classes=10).eval()
    first = iso.insert(model, lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.ReLU()), "layer3.2")
    second = iso.insert(model, lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.GELU()), "layer3.2")
    for new in map(set_gammas, (first, second)):
        with pytest.warns(UserWarning, match="iso.load cannot find"):
            iso.save(new, tmp_path / "new.safetensors")
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(iso.load(tmp_path / "new.safetensors")(x), new(x))


def test_blocks_are_copied_in_the_model_s_precision_and_trained_in_a_frozen_model_at_their_own_rate():
    block = nn.Conv2d(256, 256, 1)
    model = timm.create_model("resnet18").bfloat16().requires_grad_(False)
    new = iso.insert(model, block, "layer3.?")
    first = new.layer3[0].inserted
    second = new.layer3[1].inserted
    assert first.block is not second.block
    assert torch.equal(first.block.weight, second.block.weight)
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    for p in first.parameters():
        assert p.requires_grad
    assert not new.layer3[1].conv1.weight.requires_grad
    groups = {
        group["name"]: group
        for group in iso.training.parameter_groups(new, lr=1e-3, gamma_lr="20x")
    }
    assert {id(p) for p in groups["gammas"]["params"]} == {id(first.gamma), id(second.gamma)}
    assert groups["gammas"]["lr"] == 2e-2
    assert groups["gammas"]["weight_decay"] == 0


def test_where_gradients_are_off_and_on_the_meta_device():
    model = timm.create_model("resnet10t")
    place = "layer4.0.conv2"
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            new = iso.insert(model, MapAttention, place, torch.randn(1, 3, 64, 64))
        gamma = new.get_submodule(place).inserted.gamma
        assert (gamma.requires_grad, gamma.is_inference()) == (True, False)
    refused("a block is inserted after it, recast before", iso.recast, new, iso.ConvToGPSA(), place)
    assert (
        iso.insert(model.to("meta"), MapAttention, place)
        .get_submodule(place)
        .inserted.gamma.is_meta
    )


def in_place(channels):
    return nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 1))


REFUSALS = {
    "in one dimension": (
        "line",
        conv_block,
        "line returns a map .*, but three axes are read as tokens",
    ),
    "never called": ("head", conv_block, "head is not called as a module"),
    "iterates": ("steps", conv_block, "steps iterates over its children"),
    "in place": ("conv", in_place, "changes its input in place"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_reason(name):
    after, block, pattern = REFUSALS[name]
    refused(pattern, iso.insert, Own().eval(), block, after, example=X)


def test_a_layer_with_a_state_of_its_own_is_pickled_after_an_insertion():
    model = nn.Sequential(nn.Linear(3, 8), nn.LSTM(8, 8, batch_first=True))
    x = torch.randn(1, 16, 3)
    new = iso.insert(model, MapAttention, after="1", example=x)
    again = pickle.loads(pickle.dumps(new))
    assert torch.equal(again(x)[0], new(x)[0])


def test_a_function_that_does_not_make_a_module_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    refused(
        "returns a NoneType, not an nn.Module", iso.insert, model, lambda channels: None, "0", X
    )


def test_each_glob_of_a_list_selects_something():
    model = timm.create_model("cifar_resnet20").eval()
    message = r"'layer9.\*' in `{}` matches no {}"
    globs = ["layer3.0.conv1", "layer9.*"]
    refused(message.format("after", "module"), iso.insert, model, MapAttention, globs)
    attending = iso.recast(model, iso.ConvToGPSA(), where="layer3.*.conv?")
    refused(message.format("where", "layer that can be reverted"), iso.revert, attending, globs)
    refused(message.format("where", "gated attention layer"), iso.prune, attending, 0.01, globs)


class TwoChildren(Steps):
    def forward(self, x):
        a, b = self.children()
        return b(a(x))


def test_a_shared_last_module_and_a_model_that_counts_its_children_are_refused():
    shared = nn.ReLU()
    stages = [nn.Sequential(nn.Conv2d(c, 8, 1), shared) for c in (3, 8)]
    message = "1.1, the last module of 1, is used elsewhere too"
    refused(message, iso.insert, nn.Sequential(*stages), conv_block, "1", X)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), TwoChildren(), nn.ReLU())
    refused("does not run with a child added to 1", iso.insert, network, conv_block, "1", X)


def test_gammas_are_those_of_the_time_of_the_call():
    new = iso.insert(timm.create_model("resnet18").eval(), MapAttention, after="layer3.1")
    before = iso.analysis.gammas(new)["layer3.1"]
    set_gammas(new)
    assert not before.any()


class TwoMaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.two = TwoConvolutions()

    def forward(self, x):
        return sum(y.mean() for y in self.two(x))


class TwoConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, channels, 3) for channels in (4, 6))

    def forward(self, x):
        return [conv(x) for conv in self.convs]


def test_an_entry_of_several_is_chosen():
    net = TwoMaps().eval()
    refused("has 2 maps or tokens; give entry", iso.insert, net, MapAttention, "two", X)
    refused("no entry 'c'", iso.insert, net, MapAttention, "two", X, entry="c")
    before = net.two(X)
    for entry in (0, 1):
        after = set_gammas(iso.insert(net, MapAttention, "two", X, entry=entry)).two(X)
        assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [
            entry == 1,
            entry == 0,
        ]


@pytest.mark.parametrize("zero_init_last", [True, False])
def test_a_gamma_that_gets_no_gradient_is_named(zero_init_last):
    model = timm.create_model("resnet18", zero_init_last=zero_init_last).eval()
    notes = iso.surgery.notes(iso.insert(model, MapAttention, "layer3.1.conv2"))
    named = any("layer3.1.conv2.inserted gets no gradient" in note for note in notes)
    assert named == zero_init_last
