"""Fair timing in one process: every contender in turn, round after round, medians and ratios."""

import contextlib
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def interleaved(
    contenders: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 9,
    warm_up: int = 2,
) -> dict[str, float]:
    """Median milliseconds of each contender over interleaved rounds, after the rounds to warm up.

    With one thread on a CPU, what the processor spent on it: other programs on the machine take no part of that.
    """
    times = interleaved_rounds(contenders, device, rounds, warm_up)
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_rounds(
    contenders: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    warm_up: int = 2,
    most_seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Milliseconds of each contender in every round; no more rounds begin after `most_seconds`, but there are three."""
    clock = (
        time.process_time
        if device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter
    )
    times: dict[str, list[float]] = {name: [] for name in contenders}
    began = time.perf_counter()
    for i in range(rounds + warm_up):
        if i >= warm_up + 3 and time.perf_counter() - began > most_seconds:
            break
        for name, run in contenders.items():
            torch.clear_autocast_cache()  # weights are cast in each pass, as in each step of a training
            synchronize(device)
            start = clock()
            run()
            synchronize(device)
            if i >= warm_up:
                times[name].append(1e3 * (clock() - start))
    return times


@contextlib.contextmanager
def wall_clock() -> Iterator[None]:
    """Context in which times are wall-clock times, for commands that run in a process of their own."""
    before = time.process_time
    time.process_time = time.perf_counter
    try:
        yield
    finally:
        time.process_time = before


def forward(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """One inference pass."""

    def run() -> object:
        with torch.no_grad():
            return module(x)

    return run


def step(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """One forward and backward pass, to the input too, with fresh gradients."""
    # here, so that `show` does not import isomorph: gpu_model.py imports that of another checkout
    from isomorph.layers.modes import disable_autocast

    def run() -> object:
        module.zero_grad()
        x.grad = None
        y = module(x.requires_grad_())
        with disable_autocast(x.device):  # as a training loop calls it
            y.backward(torch.ones_like(y))

    return run


def graphed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The replay of a pass as one CUDA graph; elsewhere the pass itself, whose launches gpu_model.py counts."""
    if device.type != "cuda":
        return run
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.clear_autocast_cache()
            run()
    torch.clear_autocast_cache()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def compiled(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The module through torch's compiler, where its passes are timed and not counted."""
    return module if device.type == "meta" else torch.compile(module, dynamic=False)


def with_value(
    module: object, name: str, value: object, run: Callable[[], object]
) -> Callable[[], object]:
    """The same pass with a constant of a module changed."""

    def changed() -> object:
        old = getattr(module, name)
        setattr(module, name, value)
        try:
            return run()
        finally:
            setattr(module, name, old)

    return changed


def saved_mib(module: torch.nn.Module, x: torch.Tensor) -> float:
    """MiB that one image keeps for the backward pass."""
    return kept_mib(module, lambda: module(x.requires_grad_())) / x.shape[0]


def kept_mib(module: torch.nn.Module, run: Callable[[], object]) -> float:
    """MiB that a pass of a module keeps for the backward pass: distinct storages, parameters left out.

    On the meta device nothing is computed, and the sizes are the same.
    """
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = run()  # noqa: F841 (keeps its graph, and the storages, alive)
    return sum(kept.values()) / 2**20


def memory_mib(device: torch.device, on_cpu: float) -> float:
    """MiB that one training step may keep: a limit of the caller's on a CPU, 70% of the memory of a GPU."""
    return (
        on_cpu
        if device.type == "cpu"
        else 0.7 * torch.cuda.get_device_properties(device).total_memory / 2**20
    )


def processor() -> str:
    """The machine in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    name = next(
        (
            line.partition(":")[2].strip()
            for line in model.splitlines()
            if line.startswith("Model name")
        ),
        "CPU",
    )
    return f"{name}, {torch.get_num_threads()} threads"


def write(name: str, tables: dict[str, list[dict[str, object]]]) -> Path:
    """Writes the tables with machine and versions."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = {
        "machine": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    path.write_text(json.dumps({**about, **tables}, indent=1) + "\n")
    return path


def update(name: str, tables: dict[str, list[dict[str, object]]]) -> Path:
    """Writes the tables with those of earlier runs that are not measured again; "runs" has the machine of each."""
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    earlier = {title: rows for title, rows in found.items() if isinstance(rows, list)}
    old = f"{found.get('machine')}, torch {found.get('torch')}"
    new = f"{processor()}, torch {torch.__version__}"
    runs = dict.fromkeys(earlier, old) | found.get("runs", {}) | dict.fromkeys(tables, new)
    return write(name, {**earlier, **tables, "runs": runs})


def show(title: str, rows: list[dict[str, object]]) -> None:
    """Prints rows as a Markdown table."""
    print(f"\n{title}\n")
    heads = list(rows[0])
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for row in rows:
        print(
            "| "
            + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
            + " |",
            flush=True,
        )
