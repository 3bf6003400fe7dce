"""A GPU on paper: what the tables of gpu.py would take on an H100, from operations, bytes and arithmetic.

    python benchmarks/gpu_model.py                    # predicts the tables of this commit; errors against gpu.json
    python benchmarks/gpu_model.py --check --code DIR # fits, errors against results/gpu_f60f7d4.json; DIR is a
                                                      # checkout of f60f7d4, the commit that was measured

Every contender of a table runs once on the meta device, where nothing is computed. An operation takes the longest of
its arithmetic at the peak of its precision, its bytes (inputs once, outputs once) at the memory's bandwidth, and the
launch of a kernel. Eagerly the host issues one operation after another, and the device waits for it; in a CUDA graph
only the device counts. Peaks and bandwidth are those of the data sheet of an H100 SXM. Four numbers are fitted, on the
tables of GPSA and of pyramids: what an operation costs the host in inference and in training, where autograd records
it, the shortest kernel, and the share of peak and bandwidth that kernels reach. All other tables are predicted.

Not modelled: that kernels reach more or less of the peak by shape, caches, fusion by a compiler. Attention is one
kernel. Autocast is imitated: matrix products and convolutions in bfloat16, norms, softmax and losses in float32, each
weight cast once.
"""

import argparse
import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from interleave import show

RESULTS = Path(__file__).parent / "results"
PEAK = {torch.float32: 66.9e12, torch.bfloat16: 989.4e12, torch.float64: 66.9e12}
"""Operations a second without sparsity; float32 on the vector units, because the tables turn TF32 off."""
BANDWIDTH = 3.35e12
"""Bytes a second."""
FITTED = ("GPSA (tokens)", "Training step; times are multiples of the plain ViT's")
"""Tables of both precisions on which the costs are fitted."""
MULTIPLES = dict.fromkeys(("closed form", "branches"), "plain ms")
MULTIPLES |= {"closed form, CUDA graph": "plain, CUDA graph ms"}
"""Columns that are multiples of another column of the row."""
GRIDS: dict[str, list[float]] = {
    "inference": [1e-6 * us for us in range(5, 81)],
    "training": [1e-6 * us for us in range(5, 81)],
    "kernel": [1e-6 * us for us in (2, 3, 4, 5, 6, 8)],
    "reach": [0.05 * i for i in range(6, 21)],
}
"""Values among which costs are chosen."""
NOT_LAUNCHED = ("_unsafe_view", "empty", "new_empty", "promote_types", "result_type", "sym_", "is_")

LOWER = {
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "mv",
    "addmv",
}
LOWER |= {
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
}
UPPER = {
    "layer_norm",
    "group_norm",
    "softmax",
    "log_softmax",
    "cross_entropy",
    "exp",
    "log",
    "pow",
    "rsqrt",
    "cosine_similarity",
}


class Costs(NamedTuple):
    """Seconds of the host for an operation in inference and in training, of the shortest kernel; share of the peak."""

    inference: float = 0.0
    training: float = 0.0
    kernel: float = 0.0
    reach: float = 1.0


class Operation(NamedTuple):
    name: str
    work: float
    """Floating-point operations over the peak of their precision, s."""
    traffic: float
    """Bytes over the bandwidth, s."""


class Operations(TorchDispatchMode):
    """Record what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.trains = False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        space, name = operation._schema.name.split("::")
        if space not in ("aten", "prim", "prims"):
            with self:
                return operation.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.Meta), *args, **kwargs
                )
        output = operation(*args, **kwargs)
        views = any(
            each.alias_info and not each.alias_info.is_write for each in operation._schema.returns
        )
        if not views and not name.startswith(NOT_LAUNCHED):
            tensors = [
                t for t in tree_flatten((args, kwargs, output))[0] if isinstance(t, torch.Tensor)
            ]
            distinct = {(t.untyped_storage()._cdata, t.shape): t for t in tensors}.values()
            traffic = sum(t.numel() * t.element_size() for t in distinct)
            count = flop_registry.get(operation.overloadpacket)
            flops = count(*args, **kwargs, out_val=output) if count else 0
            dtype = next((t.dtype for t in tensors), torch.float32)
            self.trains |= torch.is_grad_enabled()
            self.found.append(
                Operation(name, flops / PEAK.get(dtype, 66.9e12), traffic / BANDWIDTH)
            )
        return output


class OnGPU(TorchFunctionMode):
    """What a GPU does to calls that the meta device does otherwise: one kernel for attention, and autocast."""

    casting: ClassVar[bool] = False
    """Whether autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: dict[int, Tensor] = {}

    @classmethod
    @contextlib.contextmanager
    def set_casting(cls, casting: bool) -> Iterator[None]:
        before, cls.casting = cls.casting, casting
        try:
            yield
        finally:
            cls.casting = before

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if self.casting and name in LOWER | UPPER:
            dtype = torch.bfloat16 if name in LOWER else torch.float32
            args, kwargs = tree_map(lambda value: self.to(value, dtype), (args, kwargs))
        return (
            fused_attention(*args, **kwargs)
            if name == "scaled_dot_product_attention"
            else function(*args, **kwargs)
        )

    def to(self, value: Any, dtype: torch.dtype) -> Any:
        if (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or value.dtype == dtype
        ):
            return value
        if isinstance(value, nn.Parameter):
            if id(value) not in self.cast:
                self.cast[id(value)] = value.to(dtype)
            return self.cast[id(value)]
        return value.to(dtype)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    kept = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, kept, dropout_p, is_causal, scale=scale
    )[0]


class Pass(NamedTuple):
    """What a contender launches: seconds of arithmetic and of traffic of each operation, and whether it trains."""

    work: np.ndarray
    traffic: np.ndarray
    trains: bool

    def milliseconds(self, costs: Costs) -> float:
        """Time if the host issues one operation after another; without host costs, of the pass as a CUDA graph."""
        host = costs.training if self.trains else costs.inference
        busy = np.maximum(np.maximum(self.work, self.traffic) / costs.reach, costs.kernel)
        # from an operation's start to the end, if the device never waits again
        after = busy[::-1].cumsum()[::-1]
        return 1e3 * float((host * np.arange(1, len(busy) + 1) + after).max())


class Recorder:
    """Stands where the tables time their contenders: for each it returns its number, by which its rows are found."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def __call__(
        self, contenders: dict[str, Callable[[], object]], *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        return {name: self.record(run) for name, run in contenders.items()}

    def record(self, run: Callable[[], object]) -> float:
        with OnGPU(), Operations() as mode:
            run()
        work, traffic = np.array([operation[1:] for operation in mode.found]).T
        self.passes.append(Pass(work, traffic, mode.trains))
        return float(len(self.passes))


def imitate_autocast() -> None:
    """Answer torch's and isomorph's questions for the meta device as for a GPU."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda kind=None: (
        OnGPU.casting if kind == "meta" else enabled(*filter(None, [kind]))
    )
    torch.get_autocast_dtype = lambda kind: torch.bfloat16 if kind == "meta" else dtype(kind)
    for module in [
        module for name, module in sys.modules.items() if name.startswith("isomorph.layers")
    ]:
        for name, stand_in in (
            ("disable_autocast", lambda _: OnGPU.set_casting(False)),
            ("autocast_dtype", autocast_dtype),
            ("is_autocast_on", lambda _: OnGPU.casting),
            ("is_arithmetic_bound", lambda _: False),  # the form of a GPU
        ):
            if hasattr(module, name):
                setattr(module, name, stand_in)


def autocast_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if OnGPU.casting and x.dtype != torch.float64 else x.dtype


def tables(
    code: Path, recorder: Recorder
) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """The tables of a checkout's gpu.py on the meta device, with `recorder` in the place of the clock."""
    sys.path[:0] = [str(code / "src"), str(code / "benchmarks")]
    import interleave

    interleave.interleaved = recorder
    interleave.saved_mib = lambda module, x: 1.0
    interleave.memory_mib = lambda device, on_cpu: float("inf")
    import gpu

    imitate_autocast()
    for precision in ("float32", "bfloat16"):
        for title, table, sizes in gpu.tables():
            run = functools.partial(table, torch.device("meta"), rounds=1, **sizes)
            with OnGPU.set_casting(precision == "bfloat16"):
                yield f"{title} ({precision})", run


class Timed(NamedTuple):
    """A contender of a table: what its row is about, the name of its time there, and its pass."""

    about: str
    key: str
    launched: Pass


def timed(rows: list[dict[str, Any]], passes: list[Pass]) -> Iterator[Timed]:
    """The contenders of a table whose times stand in it, as milliseconds or as multiples of the plain network's."""
    for row in rows:
        for key, value in row.items():
            if "ms" in key.split() and isinstance(value, float):
                yield Timed(about(row), key, passes[round(value) - 1])
            elif key in MULTIPLES and isinstance(value, float):
                yield Timed(about(row), key, passes[round(value * row[MULTIPLES[key]]) - 1])


def about(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value}"
        for key, value in row.items()
        if isinstance(value, str | int) and key != "rounds"
    )


def measured_ms(rows: list[dict[str, Any]], contender: Timed) -> float | None:
    """What was measured for a contender, if its row was."""
    row = next((row for row in rows if about(row) == contender.about), {})
    value = row.get(contender.key)
    return value * row[MULTIPLES[contender.key]] if contender.key in MULTIPLES and value else value


def predicted_ms(table: str, contender: Timed, costs: Costs) -> float:
    graph = "CUDA graph" in f"{table} {contender.key}"
    return contender.launched.milliseconds(
        costs._replace(inference=0.0, training=0.0) if graph else costs
    )


def errors(
    contenders: dict[str, list[Timed]], measured: dict[str, Any], costs: Costs
) -> dict[str, list[float]]:
    """Print and return the relative errors of the predictions, table by table."""
    off: dict[str, list[float]] = {}
    for name, each in contenders.items():
        pairs = [
            (predicted_ms(name, c, costs), measured_ms(measured.get(name, []), c)) for c in each
        ]
        if found := [predicted / real - 1 for predicted, real in pairs if real]:
            off[name] = [round(error, 3) for error in found]
            fitted = ", fitted" if name.startswith(FITTED) else ""
            listed = " ".join(f"{100 * e:+.0f}" for e in found)
            print(
                f"{name}{fitted}: median {100 * statistics.median(map(abs, found)):.0f}%; {listed}"
            )
    return off


def median_errors(off: dict[str, list[float]], besides: tuple[str, ...] = ()) -> dict[str, float]:
    medians = {}
    for precision in ("float32", "bfloat16"):
        if kept := [
            abs(e)
            for n, each in off.items()
            if precision in n and not n.startswith(besides)
            for e in each
        ]:
            medians[precision] = round(statistics.median(kept), 3)
            print(
                f"{precision}: median error of {len(kept)} predictions {100 * medians[precision]:.0f}%"
            )
    return medians


def fit(pairs: list[tuple[float, Pass]]) -> Costs:
    """The costs with the smallest median error, one after another until none changes."""

    def error(costs: Costs) -> float:
        return statistics.median(
            abs(launched.milliseconds(costs) / real - 1) for real, launched in pairs
        )

    costs, before = Costs(20e-6, 20e-6, 3e-6, 0.7), None
    while costs != before:
        before = costs
        for name, values in GRIDS.items():
            costs = min((costs._replace(**{name: value}) for value in values), key=error)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--code", type=Path, default=Path(__file__).parents[1], help="checkout whose tables are run"
    )
    parser.add_argument(
        "--check", action="store_true", help="fit, and print every error of f60f7d4"
    )
    options = parser.parse_args()
    path = RESULTS / "gpu_model.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    measured = json.loads(
        (RESULTS / ("gpu_f60f7d4.json" if options.check else "gpu.json")).read_text()
    )
    recorder = Recorder()
    contenders, failed = {}, {}
    for name, run in tables(options.code.resolve(), recorder):
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(None):
                contenders[name] = list(timed(run(), recorder.passes))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            print(f"{name}: not predicted, {failed[name]}", flush=True)
    if options.check:
        pairs = {
            name: [(real, c) for c in each if (real := measured_ms(measured.get(name, []), c))]
            for name, each in contenders.items()
        }
        costs = fit(
            [
                (real, c.launched)
                for n, each in pairs.items()
                if n.startswith(FITTED)
                for real, c in each
            ]
        )
        off = errors(contenders, measured, costs)
        found = dict(
            costs=costs._asdict(),
            fitted_on=FITTED,
            median_error=median_errors(off, FITTED),
            not_run=failed,
        )
        found["errors"] = off
    costs = Costs(**found["costs"])
    print({name: f"{value:.3g}" for name, value in found["costs"].items()})
    if not options.check:
        found["later errors"] = errors(contenders, measured, costs)
        found["later median_error"] = median_errors(found["later errors"])
        graph = costs._replace(inference=0.0, training=0.0)
        found["predicted"] = {
            name: [
                {
                    "row": c.about,
                    "contender": c.key,
                    "operations": len(c.launched.work),
                    "eager ms": round(c.launched.milliseconds(costs), 3),
                    "CUDA graph ms": round(c.launched.milliseconds(graph), 3),
                }
                for c in each
            ]
            for name, each in contenders.items()
        }
    path.write_text(json.dumps(found, indent=1) + "\n")
    for name, each in found["predicted"].items() if not options.check else ():
        if each:
            show(name, each)


if __name__ == "__main__":
    main()
