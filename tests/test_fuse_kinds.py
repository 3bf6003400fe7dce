"""What `fuse` may not change, by kinds: other calls and sizes, choices by numbers, traces of trials, precision."""

import contextlib
import copy
import io
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.operations import see, tensors_in
from isomorph.slow_work import SlowWork
from isomorph.surgery import fuse_with_report
from law_rows import deviation, disturb
from refusals import refused
from test_fuse_norms import Net, conv

X = torch.randn(2, 4, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SIZES = ((2, 4, 9, 8), (1, 4, 7, 7), (1, 4, 12, 13))


def made(model):
    torch.manual_seed(0)
    return disturb(model)


def equal(one, other):
    tensors = tensors_in(one), tensors_in(other)
    assert len(tensors[0]) == len(tensors[1]) > 0
    return max(map(deviation, *tensors)) < 1e-12


class Embedding(nn.Module):
    """A network whose norm before the classifier is also given out, in several ways."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(4, 6, 3)
        self.bnneck = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 3, 1)

    def encode(self, x):
        return self.bnneck(self.stem(x).relu())

    def forward(self, x):
        return self.head(self.encode(x))


class ByFlag(Embedding):
    def forward(self, x, embed=False):
        return self.encode(x) if embed else self.head(self.encode(x))


class ByAnnotatedFlag(Embedding):
    def forward(self, x, embed: bool | None = None):
        return self.encode(x) if embed else self.head(self.encode(x))


class ByConfiguration(Embedding):
    config = SimpleNamespace(output_hidden_states=False)

    def forward(self, x, **options):
        features = self.encode(x)
        logits = self.head(features)
        return (logits, features) if options.get("output_hidden_states") else logits


class ByAttribute(Embedding):
    def forward(self, x):
        self.features = [self.encode(x)]
        return self.head(self.features[0])


class ByPlainAttribute(Embedding):
    def forward(self, x):
        self.features = self.encode(x)
        return self.head(self.features)


class OfNames(Embedding):
    """A model of two inputs with a method of one of them."""

    def get_features(self, image):
        return super().encode(image)

    def encode(self, image, text):
        return self.get_features(image) + text.mean()

    def forward(self, image, text):
        return self.head(self.get_features(image)) * text.mean()


def in_stages():
    """Chains of linear layers and a norm that reads the output of a stage."""
    first = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    second = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    return Net(
        lambda m, x: m.head(m.features(x)),
        features=nn.Sequential(first, second),
        head=nn.Conv2d(3, 2, 1),
    )


def in_a_body():
    return Net(lambda m, x: m.head(m.body(x)), body=in_stages(), head=nn.Conv2d(2, 3, 1))


class Held:
    __slots__ = ("features",)

    def __init__(self, features):
        self.features = features


def given_out(how):
    """A network that returns its features inside an object, next to its logits."""

    def compute(m, x):
        features = m.norm(m.conv(x).relu())
        return m.head(features), how(features)

    return lambda: Net(
        compute, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6), head=nn.Conv2d(6, 3, 1)
    )


def call_encode(m, x):
    return m.encode(x)


def of_names(m, x):
    return m.get_features(x), m.encode(x, x)


WAYS = {
    "method": (Embedding, call_encode),
    "flag": (ByFlag, lambda m, x: m(x, embed=True)),
    "annotated flag": (ByAnnotatedFlag, lambda m, x: m(x, embed=True)),
    "configured output": (ByConfiguration, lambda m, x: m(x, output_hidden_states=True)),
    "attribute": (ByAttribute, lambda m, x: (m(x), m.features)),
    "tensor as attribute": (ByPlainAttribute, lambda m, x: (m(x), m.features)),
    "method of one input of two": (OfNames, of_names),
    "child alone": (in_a_body, lambda m, x: m.body(x)),
    "first stages": (in_stages, lambda m, x: [m.features[:1](x), m.features[0](x)]),
    "slots": (given_out(Held), lambda m, x: m(x)),
    "closure": (given_out(lambda y: lambda: y), lambda m, x: m(x)),
    "partial": (given_out(lambda y: partial(print, y)), lambda m, x: m(x)),
    "method of an object": (given_out(lambda y: Held([y]).__class__(y)), lambda m, x: m(x)),
    "generator": (given_out(lambda y: (z for z in [y])), lambda m, x: m(x)),
    "nested": (given_out(lambda y: deque([{"of": Held([y])}])), lambda m, x: m(x)),
}  # fmt: skip
"""A model, and a call of it that is not the one that `fuse` is shown."""


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_every_way_to_a_value_keeps_it(name):
    make, way = WAYS[name]
    model = made(make())
    example = {"image": X, "text": X} if name == "method of one input of two" else X
    new, _ = fuse_with_report(model, example)
    for size in SIZES:
        x = torch.randn(size, dtype=torch.float64)
        assert equal(way(new, x), way(model, x))


def borders(model, x):
    """Inputs and outputs of all modules that have others inside."""
    found = []
    for module in model.modules():
        if any(True for _ in module.children()):
            module.register_forward_hook(lambda _, inputs, output: found.append((inputs, output)))
    model(x)
    return found


def pre_norm_blocks():
    """A norm that reads a sum and is read by the first layer of a module that holds more."""

    def block(m, x):
        return x + m.mlp(m.norm(x))

    def make():
        mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        return Net(block, norm=nn.LayerNorm(4), mlp=mlp)

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Net(lambda m, x: m.b(m.a(x)), a=make(), b=make())

        def forward(self, x):
            return self.body(x)

    return Blocks()


@torch.no_grad()
def test_merges_across_modules_are_listed_or_left_out():
    model = made(pre_norm_blocks())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    new, report = fuse_with_report(model, x, affine=True)
    assert report.across == {"body.a.norm": "body.a.mlp", "body.b.norm": "body.b.mlp"}
    assert "merged across body.a.mlp" in str(report)
    assert any("body.a.mlp" in note for note in iso.surgery.notes(new))
    assert equal(new(x), model(x))
    assert not equal(borders(copy.deepcopy(new), x), borders(copy.deepcopy(model), x))
    kept, report = fuse_with_report(model, x, affine=True, across=False)
    assert not report.across
    assert "across=False" in report.left["body.a.norm"]
    assert equal(borders(kept, x), borders(model, x))


@torch.no_grad()
def test_without_across_all_values_between_modules_stay():
    model = made(in_stages())
    kept, report = fuse_with_report(model, X, across=False)
    assert report.left.keys() == {"features.1.0"}
    assert equal(borders(kept, X), borders(model, X))


@torch.no_grad()
def test_larger_sizes_are_tried_and_what_no_call_runs_is_named():
    def compute(m, x):
        y = m.norm(m.conv(x))
        y = m.extra(y) if x.shape[-1] > 20 else y
        return m.head(y.relu()) if x.shape[-1] < 99 else m.other(y)

    parts = dict(conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6), extra=nn.Conv2d(6, 6, 1))
    model = made(Net(compute, **parts, head=nn.Conv2d(6, 3, 1), other=nn.Conv2d(6, 3, 1)))
    new, report = fuse_with_report(model, torch.randn(1, 4, 16, 16, dtype=torch.float64))
    assert report.uncalled == ("other",)
    assert "no example calls them: other" in str(report)
    for size in (12, 16, 24, 100):
        x = torch.randn(1, 4, size, size, dtype=torch.float64)
        assert equal(new(x), model(x))
    with pytest.warns(UserWarning, match="no example calls other"):
        iso.fuse(model, torch.randn(1, 4, 16, 16, dtype=torch.float64))


@torch.no_grad()
def test_a_path_that_no_example_takes_is_named_where_another_norm_was_merged():
    def block(norm):
        def compute(m, x):
            return m.norm(m.conv(x)) if x.shape[-1] < 99 else m.other(x)

        return Net(compute, conv=nn.Conv2d(4, 4, 1), norm=norm, other=nn.Conv2d(4, 4, 1))

    model = made(nn.Sequential(block(nn.Identity()), block(nn.BatchNorm2d(4))))
    with pytest.warns(UserWarning, match=r"no example calls 1\.other"):
        iso.fuse(model, torch.randn(1, 4, 16, 16, dtype=torch.float64))


def first(y):
    return y.flatten()[0]


NUMBERS = {
    "item": lambda y: first(y).item(),
    "float": lambda y: float(first(y)),
    "int": lambda y: int(first(y)),
    "complex": lambda y: complex(first(y)).real,
    "format": lambda y: float(f"{first(y):.9f}"),
    "text": lambda y: len(str(first(y))),
    "tolist": lambda y: y.flatten().tolist()[0],
    "bool": lambda y: bool((y > 0).any()),
    "is_nonzero": lambda y: first(y).is_nonzero(),
    "torch.is_nonzero": lambda y: torch.is_nonzero(first(y)),
    "max": lambda y: max(y.flatten()[:3]).numel(),
    "contains": lambda y: 0.0 in y,
    "equal": lambda y: torch.equal(y, y + 1),
    "allclose": lambda y: torch.allclose(y, y),
    "range": lambda y: len(range((y > 0).sum())),
    "boolean index": lambda y: len(y[y > 0]),
    "masked_select": lambda y: y.masked_select(y > 0).numel(),
    "nonzero": lambda y: len(y.nonzero()),
    "argwhere": lambda y: len(torch.argwhere(y > 0)),
    "where": lambda y: len(torch.where(y > 0)[0]),
    "unique": lambda y: len(y.round().unique()),
    "unique_consecutive": lambda y: len(torch.unique_consecutive(y.round())),
    "bincount": lambda y: len(torch.bincount((y.flatten().abs() * 9).long())),
    "repeat_interleave": lambda y: len(torch.repeat_interleave((y.flatten().abs() * 9).long())),
    "one_hot": lambda y: nn.functional.one_hot((y.flatten()[:3].abs() * 9).long()).shape[-1],
    "arange": lambda y: len(torch.arange(int(first(y).abs() * 9))),
    "packed sequence": lambda y: len(
        nn.utils.rnn.pack_padded_sequence(
            y[0].flatten(1), y[0, :, 0, 0].abs().long().clamp(1, 3), False, False
        ).batch_sizes
    ),
    "sparse": lambda y: y.relu().to_sparse().indices().shape[1],
    "numpy": lambda y: y.numpy().max(),
    "array": lambda y: np.asarray(y).max(),
    "DLPack": lambda y: np.from_dlpack(y).max(),
    "DLPack and back": lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)),
    "storage": lambda y: y.untyped_storage()[0],
    "typed storage": lambda y: y.storage()[0],
    "address": lambda y: y.data_ptr() * 0,
    "nms": lambda y: len(
        torch.ops.torchvision.nms(
            torch.cat([y[0, 0, :, :2], y[0, 0, :, :2].abs() + 9], 1), y[0, 0, :, 0], 0.5
        )
    ),
}
"""Ways in which the numbers of a tensor decide a shape, or reach Python or another library."""
FORMS = {
    "shape": lambda y: y.shape[-1],
    "size": lambda y: y.size(0),
    "length": len,
    "dimensions": lambda y: y.dim() + y.ndim + y.numel(),
    "device": lambda y: y.device.type == "cpu" or y.is_cuda,
    "dtype": lambda y: y.dtype.is_floating_point and y.is_floating_point() and not y.is_complex(),
    "strides": lambda y: y.stride(0) * y.is_contiguous(),
    "integer index": lambda y: len(y[torch.tensor([0, 0])]),
    "masked_fill": lambda y: len(y.masked_fill(y > 0, 1.0)),
    "index assigned": lambda y: y.clone().__setitem__(y > 0, 1.0),
    "gather": lambda y: len(y.gather(0, torch.zeros_like(y[:1]).long())),
    "unbind": lambda y: len(list(y)),
}
"""What only the form of a tensor decides, or no form at all."""


@pytest.mark.parametrize("name", [*NUMBERS, *FORMS])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@torch.no_grad()
def test_numbers_that_reach_python_are_seen_whatever_the_operation(name):
    read = (NUMBERS | FORMS)[name]

    def chosen(m, x):
        z = m.probe(x)
        number = read(z)
        if isinstance(number, torch.Tensor):
            number + z.sum()  # it is back
        return m.norm(m.conv(x)) if m.on else m.conv(x)

    model = made(
        Net(chosen, probe=nn.Conv2d(4, 6, 3), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    )
    model.on = True
    assert see(model, lambda: model(X)).branches_on_data == ({""} if name in NUMBERS else set())
    new, report = fuse_with_report(model, X)
    if name not in NUMBERS:
        assert list(report.merged) == ["norm"]
        return
    assert "branches on the numbers" in report.left["norm"]
    for each in (model, new):  # as other numbers would decide
        each.on = False
    assert equal(new(X), model(X))


@torch.no_grad()
def test_a_tensor_that_views_have_written_to_never_left_torch():
    """As detectors put images of several sizes into one batch."""

    def compute(m, x):
        whole = x.new_zeros(x.shape)
        for image, place in zip(x, whole, strict=True):
            place[:, : image.shape[1]].copy_(image)
        return m.norm(m.conv(whole))

    model = made(Net(compute, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6)))
    assert see(model, lambda: model(X)).branches_on_data == set()
    new, report = fuse_with_report(model, X)
    assert list(report.merged) == ["norm"]
    assert equal(new(X), model(X))


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 - 1


@torch.no_grad()
def test_what_a_scripted_function_reads_is_seen():
    def compute(m, x):
        y = m.conv(x)
        return m.norm(y) + m.gate * scripted(y)

    model = made(
        Net(
            compute,
            conv=conv(4, 6, 3)(),
            norm=nn.BatchNorm2d(6),
            gate=nn.Parameter(torch.zeros(())),
        )
    )
    model.gate.zero_()
    new, report = fuse_with_report(model, X)
    assert report.left.keys() == {"norm"}
    for each in (model, new):
        each.gate.fill_(1.0)
    assert equal(new(X), model(X))


class Remembers(nn.Module):
    """A network whose calls leave something in it, of which its outputs depend."""

    def __init__(self, how):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.how = how
        self.register_buffer("memory", torch.zeros(()))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls = 0
        self.list = []
        self.dict = {}
        self.queue = deque()
        self.object = SimpleNamespace(calls=0)

    def forward(self, x):
        return self.norm(self.conv(x)) * (1 + self.how(self))


def count(m):
    m.calls += 1
    return m.calls


def count_in_buffer(m):
    m.counter += 1
    return m.counter


def count_in_data(m):
    m.memory.data += 1
    return m.memory


def count_in_parameter(m):
    m.weight.data += 1
    return m.weight


def new_buffer(m):
    m.memory = m.memory + 1
    return m.memory


def grow(m):
    m.list.append(m.weight * 2)
    return len(m.list)


def cache(m):
    m.dict.setdefault(len(m.dict), m.weight * 2)
    return len(m.dict)


def push(m):
    m.queue.append(1)
    return len(m.queue)


def count_in_object(m):
    m.object.calls += 1
    return m.object.calls


def new_attribute(m):
    m.seen = getattr(m, "seen", 0) + 1
    return m.seen


TRACES = (count, count_in_buffer, count_in_data, count_in_parameter, new_buffer, grow, cache, push)
TRACES += (count_in_object, new_attribute)


def forms(model):
    held = [model.memory, model.counter, model.weight.item(), model.calls, model.object.calls]
    held.append(getattr(model, "seen", 0))
    return [*map(float, held), len(model.list), len(model.dict), len(model.queue)]


@pytest.mark.parametrize("how", TRACES, ids=lambda how: how.__name__)
def test_trial_calls_leave_no_trace(how):
    model = Remembers(how)
    with torch.no_grad():
        disturb(model)
        model.weight.zero_()
    before = forms(model)
    fused, report = fuse_with_report(model, X)
    assert list(report.merged) == ["norm"]
    inserted = iso.insert(model, iso.layers.MapAttention, after="norm", example=X)
    measured = iso.recalibrate(model, [X])
    for each in (model, fused, inserted, measured):
        assert forms(each) == before
        copy.deepcopy(each)  # holds no graph
    with torch.no_grad():
        expected = [copy.deepcopy(model)(X)]
        assert equal(fused(X), expected)
        assert equal(inserted(X), expected)


def test_merged_weights_that_overflow_are_an_error():
    model = made(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))).half()
    with torch.no_grad():
        model[0].weight.mul_(100)
        model[1].running_var.fill_(1e-4)
        model[1].weight.fill_(1e2)
    with pytest.raises(iso.UserError, match="is too large for float16; fuse the model") as caught:
        iso.fuse(model, X.half())
    assert caught.value.exit_status == 1


@torch.no_grad()
def test_a_module_under_two_names_is_not_tied():
    layer = nn.Conv2d(4, 6, 3)
    norm = nn.BatchNorm2d(6)
    model = Net(
        lambda m, x: m.block(x), conv=layer, norm=norm, block=nn.Sequential(layer, norm, nn.ReLU())
    )
    model = made(model)
    new, report = fuse_with_report(model, X)
    assert report.merged == {"norm": "conv"}
    assert new.block[0] is new.conv
    assert isinstance(new.block[1], nn.Identity)
    assert equal(new(X), model(X))


@torch.no_grad()
def test_for_a_file_only_forward_counts():
    model = made(in_stages())
    kept, report = fuse_with_report(model, X)
    assert "features.0 called alone" in report.left["features.1.0"]
    new, report = fuse_with_report(model, X, only_forward=True)
    assert report.left == {}
    assert report.entry_points == ("forward",)
    assert equal(new(X), model(X))
    assert equal(kept.features[0](X), model.features[0](X))


def test_work_of_more_than_five_seconds_says_so_on_a_terminal(monkeypatch):
    now = [0.0]
    shown = io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", shown)
    for is_terminal, expected in ((False, ""), (True, "\rfuse: call 9, 6 s\x1b[K\r\x1b[K")):
        shown.isatty = lambda is_terminal=is_terminal: is_terminal
        now[0] = 0.0
        with contextlib.suppress(KeyboardInterrupt), SlowWork("fuse") as work:
            for seconds, call in ((1, 2), (4.9, 7), (6, 9), (6.1, 10)):
                now[0] = seconds
                work.step(f"call {call}")
            raise KeyboardInterrupt
        assert shown.getvalue() == expected


@torch.no_grad()
def test_slices_of_a_sequence_keep_their_values():
    """A norm that its readers could hold gives the value at the end of a slice."""
    model = made(
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1))
    )
    kept, report = fuse_with_report(model, X)
    assert "2 called alone" in report.left["2"]
    for end in (2, 3, 4):
        assert equal(kept[:end](X), model[:end](X))
    thin, report = fuse_with_report(model, X, only_forward=True)
    assert report.across == {"2": "2"}
    assert "merged into what reads them, so that they give what they get: 2" in str(report)
    assert equal(thin(X), model(X))
    assert not equal(thin[:3](X), model[:3](X))


class Masked(nn.Module):
    """A mask of scores that is saved, as in GPT's code."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.register_buffer("mask", torch.full((72, 72), -torch.inf).triu(1))

    def forward(self, x):
        return self.norm(self.conv(x)).flatten(2) @ self.mask.softmax(-1)


@torch.no_grad()
def test_a_saved_mask_of_infinities_is_no_merged_weight():
    model = made(Masked())
    model.mask.copy_(torch.full((72, 72), -torch.inf).triu(1))
    new = iso.fuse(model, X)
    assert isinstance(new.norm, nn.Identity)
    assert equal(new(X), model(X))


class SavesHead(nn.Module):
    """Saves what it trains."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu())

    def state_dict(self, *args, **kwargs):
        full = super().state_dict(*args, **kwargs)
        return {name: x for name, x in full.items() if name.startswith("head.")}

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False, assign=assign)


@torch.no_grad()
def test_a_state_dict_that_leaves_layers_out():
    model = made(SavesHead())
    new = iso.fuse(model, X)
    assert isinstance(new.norm, nn.Identity)
    assert equal(new(X), model(X))


class Both(nn.Sequential):
    def forward(self, x):
        y = self[0](x)
        return y + self[1](y)


class SharedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm2d(4)
        self.parts = nn.ModuleList()
        for _ in range(2):
            self.parts.append(nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), norm))

    def forward(self, x):
        return self.parts[0](x) + self.parts[1](x)


@pytest.mark.filterwarnings("ignore:fuse merged no norms")  # no example: nothing is compared
@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_a_new_bias_stays_where_another_reads_the_norm_or_the_layer(shared):
    model = nn.Sequential(Both(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)))
    where = "0.0"
    if shared:
        model = SharedNorm()
        where = "parts.?.0"
    wide = iso.recast(model.eval(), iso.LinearToPyramid(), where)
    for name, parameter in wide.named_parameters():
        if name.endswith("bias"):
            parameter.add_(0.5)
    wide = copy.deepcopy(wide)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(iso.fuse(wide)(x), wide(x), atol=1e-4, rtol=1e-4)


def test_a_lazy_norm_without_weights_is_named():
    refused("lazy layer", iso.fuse, nn.Sequential(nn.LazyBatchNorm2d(affine=False)))


def test_a_trained_pyramid_before_a_norm_is_verified_fused():
    """The layer's own output is not what it was: the norm is merged into it."""
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))
    wide = disturb(iso.recast(net, iso.LinearToPyramid("naive-W1"), where="0"))
    thin = iso.fuse(wide, X)
    assert isinstance(thin[1], nn.Identity)
    assert iso.verify(wide, thin, X).passed
    wrong = copy.deepcopy(thin)
    wrong[0].weight.data *= 1.1
    assert not iso.surgery.compare_outputs(wide, wrong, X).passed
