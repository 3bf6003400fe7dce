"""What every rule owes, for every module in its table: equal, called, edited, copied, saved, exported, and back."""

import copy
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import isomorph as iso
from attention_layers import LAYERS
from isomorph.operations import count_calls
from isomorph.surgery.attention_layers import FACTS
from law_rows import RULES, deviation, disturb, move, moved, new_parameters, plain, recast, values

WHOLE = [name for name, row in RULES.items() if row.whole]
NOTHING_NEW = ("attention, windows",)
"""Rows whose rules add no parameters."""
EXACT = 1e-10
"""Largest relative difference in float64 of two ways to compute one function."""
RESIZED = 1e-7
"""The same where timm resizes position embeddings in float32."""


def calls(name):
    row = RULES[name]
    return [values(call) for call in (row.call, row.other) if call]


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_equal_at_initialisation_and_exact_in_the_limit(name):
    row = RULES[name]
    old = plain(name)
    found = [(recast(name), row.leak)]
    if row.limit:
        found.append((iso.recast(old, row.limit, row.where), EXACT))
    for new, bound in found:
        assert iso.edits(new)
        for x in calls(name):
            assert deviation(new(*x), old(*x)) < bound


@pytest.mark.parametrize("name", [name for name in RULES if name not in NOTHING_NEW])
def test_called_and_edited_with_and_without_gradients(name):
    """Of those with new parameters: they move the output, in every image, and each has a gradient."""
    new = moved(name)
    x = values(RULES[name].call)
    y = new(*x)
    before = recast(name)(*x)
    with torch.no_grad():
        assert deviation(new(*x), y) < EXACT
        for one, other in zip(y, before, strict=True):
            assert deviation(one, other) > 1e-6
        x[0] = x[0][:1]
        assert deviation(new(*x), y[:1]) < EXACT
    gradients = torch.autograd.grad(y.square().sum(), list(new_parameters(name, new).values()))
    for gradient in gradients:
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", [name for name in WHOLE if RULES[name].heads])
@torch.no_grad()
def test_every_head_moves_the_output_by_itself(name):
    """Each in its own way; and what two heads of an edit do is the sum of what each does."""
    row = RULES[name]
    x = values(RULES[name].call)
    moves = []
    before = recast(name)(*x)
    for head in range(row.heads):
        new = copy.deepcopy(recast(name))
        for parameter in new_parameters(name, new).values():
            if parameter.shape[0] % row.heads == 0:
                move(parameter.unflatten(0, (row.heads, -1))[head])
        moves.append((new(*x) - before).flatten())
    moves = torch.stack(moves)
    assert moves.norm(dim=1).min() > 1e-6
    assert torch.linalg.matrix_rank(moves, rtol=1e-6) == row.heads


@pytest.mark.parametrize("name", [name for name, row in RULES.items() if row.mask])
@torch.no_grad()
def test_a_mask_is_obeyed(name):
    """Equal under the mask at initialisation; moved, the tokens that it hides change nothing in the others."""
    row = RULES[name]
    old = plain(name)
    new = moved(name)
    x = values(RULES[name].call)
    assert deviation(recast(name)(*x, **row.mask), old(*x, **row.mask)) < row.leak
    y = new(*x, **row.mask)
    assert deviation(y, recast(name)(*x, **row.mask)) > 1e-6
    assert deviation(y, new(*x)) > 1e-6
    other = x[0].clone()
    other[:, -3:] = torch.randn_like(other[:, -3:])
    changed = new(other, *x[1:], **row.mask)
    assert deviation(changed[:, :-3], y[:, :-3]) < EXACT


@pytest.mark.parametrize("name", WHOLE)
def test_the_input_model_is_untouched_and_its_dtype_device_mode_and_format_are_kept(name):
    row = RULES[name]
    old = copy.deepcopy(plain(name))
    before = copy.deepcopy(old.state_dict())
    shown = repr(old)
    with torch.no_grad():
        for parameter in iso.recast(old, row.rule, row.where).parameters():
            parameter.zero_()
    assert repr(old) == shown
    assert iso.edits(old) == ()
    for key, tensor in before.items():
        assert torch.equal(tensor, old.state_dict()[key])
    for module in old.modules():
        assert not (module._forward_pre_hooks)
        assert not (module._forward_hooks)
    for dtype in (torch.float16, torch.bfloat16):
        old.to(dtype, memory_format=torch.channels_last).requires_grad_(False).train()
        new = iso.recast(old, row.rule, row.where)
        assert {p.dtype for p in new.parameters()} == {dtype}
        for p in new.parameters():
            assert not p.requires_grad
        for module in new.modules():
            assert module.training
        for p in new.parameters():
            if p.ndim == 4:
                assert p.is_contiguous(memory_format=torch.channels_last)
    old = copy.deepcopy(plain(name))
    for number, parameter in enumerate(old.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    kept = dict(iso.recast(old, row.rule, row.where).named_parameters())
    before = dict(old.named_parameters())
    for key in kept.keys() & before.keys():
        assert kept[key].requires_grad == before[key].requires_grad
    new = iso.recast(copy.deepcopy(plain(name)).to("meta"), row.rule, row.where)
    assert {p.device.type for p in new.parameters()} == {"meta"}
    for module in new.modules():
        assert not module.training
    for p in new_parameters(name, recast(name)).values():
        assert p.requires_grad


@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_saved_loaded_copied_pickled_and_exported(name, tmp_path):
    new = moved(name)
    iso.save(new, tmp_path / "new.safetensors")
    loaded = iso.load(tmp_path / "new.safetensors", base=copy.deepcopy(plain(name)))
    assert iso.edits(loaded) == iso.edits(new)
    twins = [loaded.eval(), copy.deepcopy(new), pickle.loads(pickle.dumps(new))]
    for x in calls(name):
        for twin in twins:
            assert torch.equal(twin(*x), new(*x))
    x = values(RULES[name].call)
    program = torch.export.export(twins[1].requires_grad_(False), tuple(x)).module()
    assert deviation(program(*x), new(*x)) < RESIZED


@pytest.mark.parametrize("name", [name for name in WHOLE if RULES[name].other])
def test_two_threads_at_two_sizes(name):
    new = moved(name)
    start = threading.Barrier(2)

    @torch.no_grad()
    def run(x, expected):
        start.wait()
        return all(torch.equal(new(*x), expected) for _ in range(5))

    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        outputs = [(x, new(*x)) for x in calls(name)]
        assert all(pool.map(run, *zip(*outputs, strict=True)))


@pytest.mark.parametrize("name", [name for name, row in RULES.items() if row.whole or row.limit])
def test_the_way_back_after_use(name):
    """The layer was trained on, at two sizes; going back gives the class, the names and the function of before."""
    row = RULES[name]
    old = plain(name)
    new = iso.recast(old, row.limit or row.rule, row.where)
    for x in calls(name):
        new.train()
        new(*x).square().sum().backward()
    new.eval()
    back = row.back(new)
    x = values(row.call)
    with torch.no_grad():
        assert deviation(back(*x), new(*x)) < max(row.leak, EXACT)
    if row.back is iso.revert and row.whole:
        assert iso.edits(back) == ()
        assert repr(back) == repr(old)
        for module in back.modules():
            assert not (module._forward_pre_hooks)
            assert not (module._forward_hooks)


ENCODER = functools.partial(nn.TransformerEncoderLayer, 16, 4, 16, batch_first=True)


def encoder():
    return nn.TransformerEncoder(ENCODER(), 2)


INSIDE = {
    "refined": (ENCODER, iso.AttentionToRefined(), "self_attn", iso.revert),
    "pyramids": (ENCODER, iso.LinearToPyramid(), "linear1", iso.fuse),
    "pyramids, encoder": (encoder, iso.LinearToPyramid(), "layers.*.linear?", iso.fuse),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_called_inside_a_parent_with_a_fast_path(name, tmp_path):
    """That of nn.TransformerEncoderLayer, and of its encoder, which packs what a mask leaves."""
    make, rule, where, way = INSIDE[name]
    old = disturb(make()).requires_grad_(False)
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    masks = [{}] + [{"src_key_padding_mask": torch.arange(16).expand(2, 16) > 12}] * (
        "encoder" in name
    )
    new = iso.recast(old, rule, where)
    iso.save(new, tmp_path / "new.safetensors")
    loaded = iso.load(tmp_path / "new.safetensors", base=copy.deepcopy(old)).eval()
    for model in (new, loaded, copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        for mask in masks:
            with count_calls(model, iso.edits(new)[0].names) as calls:
                y = model(x, **mask)
            assert deviation(y[:, :13], old(x, **mask)[:, :13]) < 1e-5
            assert calls == dict.fromkeys(iso.edits(new)[0].names, 1)
    assert deviation(way(new)(x), old(x)) < 1e-5


def test_every_class_of_the_tables_has_a_row():
    rejected = {name for name in FACTS if "Outlook" in name or "Shifted" in name}
    edited = {name for name, facts in FACTS.items() if facts and not facts.no_map} - rejected
    rows = [row.make() for row in LAYERS.values()]
    assert edited <= {
        f"{type(part).__module__}.{type(part).__name__}" for row in rows for part in row.modules()
    }
    assert len(FACTS) <= 40
