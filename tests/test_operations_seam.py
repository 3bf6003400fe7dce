"""What a model computes is seen, read and changed by operation, whatever its classes; what cannot be is an error."""

import gc
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention_layers import LAYERS
from isomorph.operations import EditMaps, FusedCall, ReadMaps, see, tensors_in
from isomorph.surgery.attention_layers import attention_facts, heads_of
from isomorph.surgery.edited_attention import edit_map
from law_rows import Alone, deviation, disturb, values

# heads as wide as there are tokens: shapes tell nothing
B = 2
H = 3
N = 6
W = 6
X = torch.randn(B, N, H * W, dtype=torch.float64)
FORMS = {
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "method": lambda q, k, v: (q @ k.mT * W**-0.5).softmax(-1) @ v,
    "function": lambda q, k, v: torch.matmul(torch.softmax(q @ k.mT * W**-0.5, dim=3), v),
    "values first": lambda q, k, v: (v.mT @ (q @ k.mT * W**-0.5).softmax(-1).transpose(-2, -1)).mT,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", (q @ k.mT * W**-0.5).softmax(-1), v),
    "in place": lambda q, k, v: (q @ k.mT * W**-0.5).softmax(-1).mul(1).mul_(1) @ v,
    "dropout": lambda q, k, v: nn.Dropout(0.5).eval()(F.softmax(q @ k.mT * W**-0.5, -1)) @ v,
    "bmm": lambda q, k, v: torch.bmm(
        (q @ k.mT * W**-0.5).softmax(-1).flatten(0, 1), v.flatten(0, 1)
    ).unflatten(0, (B, H)),
}  # fmt: skip


class Attend(nn.Module):
    """Attention in one of the forms, with its map edited: every head multiplied by its own number, and mixed."""

    def __init__(self, form, mix=None):
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(H * W, 3 * H * W)
        self.scale = nn.Parameter(1 + torch.rand(H, 1, 1))
        self.mix = mix
        self.double()

    def attend(self, x):
        return self.form(*self.qkv(x).unflatten(-1, (3, H, W)).permute(2, 0, 3, 1, 4))

    def edit(self, maps, mask):
        joint = maps.ndim == 3 and maps.shape[0] == B * H
        scale = (
            self.scale.repeat(B, 1, 1)
            if joint
            else self.scale
            if maps.ndim > 3
            else self.scale.mean()
        )
        return maps * scale + maps.square()

    def forward(self, x):
        mode = EditMaps(self.edit)
        with mode:
            out = self.attend(x)
        if not mode.edited:
            raise ValueError("not edited")
        return out


@torch.no_grad()
def slow(layer, x):
    """Attention with the same edit, written out."""
    q, k, v = layer.qkv(x).unflatten(-1, (3, H, W)).permute(2, 0, 3, 1, 4)
    maps = torch.zeros(B, H, N, N, dtype=x.dtype)
    for b, h, i in ((b, h, i) for b in range(B) for h in range(H) for i in range(N)):
        scores = [q[b, h, i] @ k[b, h, j] for j in range(N)]
        row = torch.tensor(scores) * W**-0.5
        maps[b, h, i] = row.exp() / row.exp().sum()
    return (maps * layer.scale + maps.square()) @ v


@pytest.mark.filterwarnings(
    "ignore:While compiling, we found certain side effects"
)  # of any mode, in strict export
@pytest.mark.parametrize("form", FORMS)
def test_an_edit_acts_in_every_form_compiled_exported_and_mapped(form):
    torch.manual_seed(0)
    layer = Attend(FORMS[form])
    y = layer(X)
    assert deviation(y, slow(layer, X)) < 1e-12
    torch._dynamo.reset()
    assert deviation(torch.compile(layer, fullgraph=True, backend="aot_eager")(X), y) < 1e-12
    for strict in (False, True):
        assert deviation(torch.export.export(layer, (X,), strict=strict).module()(X), y) < 1e-12
    if form != "bmm":  # which names the number of images
        assert deviation(torch.vmap(lambda x: layer(x[None])[0])(X), y) < 1e-12


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_map_that_is_read_is_the_one_that_weighs_values(form):
    layer = Attend(FORMS[form])
    mode = ReadMaps()
    v = layer.qkv(X).unflatten(-1, (3, H, W)).permute(2, 0, 3, 1, 4)[2]
    for run, edited in ((layer.attend, False), (layer, True)):
        with mode:
            mode.enter(heads=H)
            out = run(X)
            applied = mode.leave()
        maps = applied.map()
        assert deviation(maps @ v, out) < 1e-12
        assert deviation(torch.stack([applied.row(i) for i in range(N)], 2), maps) < 1e-12
        assert deviation(torch.cat(list(applied.chunks())), maps) < 1e-12
        assert (
            (maps.sum(-1) - 1).abs().max() > 0.1
            if edited
            else deviation(applied.logits.map(), maps) < 1e-12
        )


def test_talking_heads_belong_to_the_map_and_dropout_does_not():
    talk = nn.Linear(H, H).double()
    drop = nn.Dropout(0.5)

    def form(q, k, v):
        maps = talk((q @ k.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return drop(maps) @ v

    layer = Attend(form)
    q, k, v = layer.qkv(X).unflatten(-1, (3, H, W)).permute(2, 0, 3, 1, 4)
    attention = (q @ k.mT).softmax(-1)
    mixed = talk(attention.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    maps = layer.edit(mixed, None)
    torch.manual_seed(0)
    y = layer(X)
    torch.manual_seed(0)
    assert deviation(F.dropout(maps, 0.5) @ v, y) < 1e-12
    fused = Attend(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.5))
    fused.load_state_dict(layer.state_dict())
    torch.manual_seed(0)
    expected = F.dropout(fused.edit((q @ k.mT * W**-0.5).softmax(-1), None), 0.5) @ v
    torch.manual_seed(0)
    assert deviation(fused(X), expected) < 1e-12


@pytest.mark.parametrize("floating", [False, True])
def test_a_fused_call_is_that_of_torch_with_masks_shared_keys_and_empty_rows(floating):
    q, k, v = torch.randn(B, 4, N, W), *torch.randn(2, B, 2, N, W)
    allowed = torch.rand(B, 1, N, N) < 0.6
    allowed[0, 0, 2] = False
    mask = torch.randn(B, 4, N, N).masked_fill(~allowed, -torch.inf) if floating else allowed
    parts = [x.double().requires_grad_() for x in (q, k, v)]
    given = dict(attn_mask=mask.double() if floating else mask, scale=0.3, enable_gqa=True)
    outs = [
        F.scaled_dot_product_attention(*parts, **given),
        FusedCall(*parts, **given).attend(lambda maps, _: maps),
    ]
    assert deviation(*outs) < 1e-12
    assert not outs[1][0, :, 2].any()
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), parts) for y in outs), strict=True
    ):
        assert deviation(one, other) < 1e-12


UNSEEN = {
    "torch.special": lambda q, k, v: torch.special.softmax(q @ k.mT, -1) @ v,
    "over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "one operation": lambda q, k, v: nn.MultiheadAttention(W, 1).double()(
        *(x.flatten(0, 1) for x in (q, k, v))
    )[0],
}


@pytest.mark.parametrize("form", UNSEEN)
def test_a_map_that_is_not_seen_is_not_edited_silently(form):
    with pytest.raises(ValueError, match="not edited"):
        Attend(UNSEEN[form])(X)


def test_causal_attention_and_reentrant_checkpoints_are_errors():
    with pytest.raises(ValueError, match="is_causal"):
        Attend(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))(X)
    layer = Attend(lambda q, k, v: checkpoint(FORMS["method"], q, k, v, use_reentrant=True))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        layer(X)
    plain = Attend(FORMS["fused"])
    gradients = []
    for options in (None, dict(use_reentrant=False), dict(use_reentrant=True)):
        x = X.clone().requires_grad_()
        (checkpoint(plain, x, **options) if options else plain(x)).square().sum().backward()
        gradients.append(x.grad)
    assert deviation(gradients[1], gradients[0]) < 1e-12
    assert deviation(gradients[2], gradients[0]) < 1e-12


def test_threads_edit_their_own_calls_alone():
    plain = Attend(FORMS["method"])
    edited = Attend(FORMS["method"])
    calls = [(call, call(X)) for call in (plain.attend, edited)]
    with ThreadPoolExecutor(2) as pool:
        assert all(
            pool.map(lambda pair: all(torch.equal(pair[0](X), pair[1]) for _ in range(30)), calls)
        )


class Scale(nn.Module):
    """An edit that multiplies the map of every head by a number."""

    def __init__(self, heads, **kind):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads, 1, 1, **kind))

    def forward(self, maps, call):
        return maps * self.scale


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("multihead")])
@torch.no_grad()
def test_every_head_of_every_class_is_edited_by_itself(name):
    """Heads doubled one at a time move the output in as many directions; all doubled at once, by their sum."""
    torch.manual_seed(0)
    layer = disturb(LAYERS[name].make(), 0.7)
    x = values((LAYERS[name].shape, *LAYERS[name].more))
    new = Alone(edit_map(layer, Scale, (4, 6), 0))
    heads = new.layer.edited_heads
    before = Alone(layer)(*x)
    assert deviation(new(*x), before) < 1e-12
    assert heads == heads_of(layer, attention_facts(type(layer)))
    if heads == 1:
        new.layer.map_edit.scale[0] = 2
        assert deviation(new(*x), before) > 1e-6
        return
    moves = []
    for head in range(heads):
        new.layer.map_edit.scale.fill_(1)[head] = 2
        moves.append((new(*x) - before).flatten())
    moves = torch.stack(moves)
    assert moves.norm(dim=1).min() > 1e-6
    assert torch.linalg.matrix_rank(moves, rtol=1e-6) == heads


class Averaging(nn.Module):
    """Attention that takes the mean instead of forming its map when it is told to."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.averages = False

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return v.mean(1, keepdim=True).expand_as(v) if self.averages else (q @ k.mT).softmax(-1) @ v


def test_a_call_that_passes_an_edit_by_is_an_error():
    layer = edit_map(Averaging(), Scale, None, None)
    x = torch.randn(2, 7, 12)
    assert layer(x).shape == x.shape
    layer.averages = True
    with pytest.raises(ValueError, match="Averaging did not form its map in this call"):
        layer(x)


class Net(nn.Module):
    """Layers whose outputs are read by a norm, by a norm and a sum, and twice; one whose weight alone is read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.idle = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)
        self.other = nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.norm(self.a(x).flatten(0, 1)).relu_()
        z = self.b(y)
        return self.other(z) + z + F.linear(y, self.idle.weight) + self.c(self.c(y))


def test_flow_sees_values_readers_and_calls():
    net = Net().eval()
    flow = see(net, lambda: net(torch.randn(2, 3, 4)))
    assert "idle" not in flow.outputs
    (relu,) = flow.reads[flow.outputs["norm"][0][0]]
    assert relu.inputs[0][0] == relu.outputs[0][0] != relu.inputs[0]
    assert [each.name for each in flow.reads[relu.outputs[0]]].count("linear") == 3


def test_tensors_are_found_in_the_order_of_their_container():
    """Results of `torch.max` and outputs of transformers are kinds of tuples and dicts; no tensor comes twice."""
    x = torch.randn(2, 3)
    largest = torch.max(x, 1)
    assert all(map(torch.equal, tensors_in(largest), (largest.values, largest.indices)))
    output = OrderedDict(first=x, second=(x + 1, x + 2))
    output.first = x
    assert [float(tensor[0, 0] - x[0, 0]) for tensor in tensors_in(output)] == pytest.approx(
        [0, 1, 2]
    )


@torch.no_grad()
def test_the_tensors_of_a_call_are_freed_with_what_was_seen():
    """Without a circle that Python would look for later: hundreds of MB for a large network."""
    unit = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    gc.disable()
    try:
        flow = see(unit, lambda: unit(x))
        (made,) = [weakref.ref(flow.tensors[value]) for value in flow.operations[0].outputs]
        assert made() is not None
        del flow
        assert made() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_product_into_a_given_tensor_is_not_edited():
    layer = Attend(lambda q, k, v: torch.matmul((q @ k.mT).softmax(-1), v, out=torch.empty_like(q)))
    assert layer.attend(X).shape == (B, H, N, W)
    with pytest.raises(ValueError, match="not edited"):
        layer(X)
