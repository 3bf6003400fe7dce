"""Fixtures: real data where it is, seeds, caches of a test's own. And what the tests took, against the budget."""

import gc
import os
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from requirements import describe_skipped, hide_network, is_alone, missing

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
hide_network()
if is_alone():
    os.environ.pop("ISOMORPH_DATA", None)
elif "ISOMORPH_DATA" not in os.environ and SHARED.is_dir():
    os.environ["ISOMORPH_DATA"] = str(SHARED)

# Fixtures by which tests depend on the folder of data sets.
OF_DATA = {"data_root", "public_weights"}

BUDGET = 15
"""Seconds for one test on a quiet machine; see "Tests" in CONTRIBUTING.md."""

gc.disable()


def pytest_ignore_collect(collection_path, config):
    """With `-m data`, import no file that asks for none of these fixtures."""
    if config.option.markexpr != "data" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if any(fixture in text for fixture in OF_DATA) else True


def pytest_collection_modifyitems(items):
    """Mark the tests that run otherwise where the folder of data sets is missing."""
    for item in items:
        if OF_DATA.intersection(item.fixturenames):
            item.add_marker("data")


def pytest_collection_finish():
    """Leave what importing made out of every collection of garbage: it stays, and a collection took half a second.

    Garbage is collected more rarely than Python does by itself, which took a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)
    gc.enable()


def pytest_unconfigure():
    """Collect what is frozen at the end: triton prints a hundred lines about objects that outlive it."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    """Say what skipped tests want; after a long run, what all tests took and which took more than the budget."""
    for line in describe_skipped(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)
    took = Counter()
    for report in (report for kind in terminalreporter.stats.values() for report in kind):
        if isinstance(report, pytest.TestReport):
            took[report.nodeid] += report.duration
    if took.total() < 120:
        return
    over = [
        f"  {seconds:.0f} s  {name}" for name, seconds in took.most_common() if seconds > BUDGET
    ]
    terminalreporter.write_line(
        f"{len(took):,} tests took {took.total():,.0f} s, added up over the processes."
    )
    if over:
        terminalreporter.write_line(
            f"More than the {BUDGET} s that one test may take (CONTRIBUTING.md, Tests):"
        )
        terminalreporter.write_line("\n".join(over))


@pytest.fixture
def data_root() -> Path:
    """The folder of small real data sets and weights."""
    root = Path(os.environ.get("ISOMORPH_DATA", ""))
    if "ISOMORPH_DATA" in os.environ and (root / "cifar10").is_dir():
        return root
    return missing("needs the real data sets: set ISOMORPH_DATA to their folder")


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory):
    """A folder of data with weights alone, trained in seconds."""
    from small_images import train_public_weights

    return train_public_weights(tmp_path_factory.mktemp("data"))


@pytest.fixture
def public_weights(request, monkeypatch):
    """The public weights of cifar_resnet20 in $ISOMORPH_DATA, or, where there are none, others in their place."""
    if not Path(os.environ.get("ISOMORPH_DATA", ""), "weights").is_dir():
        monkeypatch.setenv("ISOMORPH_DATA", str(request.getfixturevalue("tiny_weights")))


@pytest.fixture(autouse=True, scope="session")
def unfilled_meta_tensors():
    """Fill no tensor on the meta device, which holds no values: timm's truncated normal takes 10 ms a tensor there."""
    # not above: xdist's first process would import it before the others start
    from timm.layers import weight_init
    from torch.nn import init

    def unless_meta(fill):
        return lambda tensor, *args, **kwargs: (
            tensor if tensor.is_meta else fill(tensor, *args, **kwargs)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_init, "_trunc_normal_", unless_meta(weight_init._trunc_normal_))
        for name in ("kaiming_normal_", "kaiming_uniform_", "uniform_", "xavier_uniform_"):
            patch.setattr(init, name, unless_meta(getattr(init, name)))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_list_of_onnx_operators():
    """Read the sources of ONNX's operators once a process: torch reads them again for every file."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))
        )
        yield


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ended(tmp_path_factory):
    """The folder and the result of a tiny run that has ended, for all tests that need one: do not change it."""
    import isomorph as iso
    from tiny_runs import ENDED, tiny

    folder = tmp_path_factory.mktemp("ended")
    return folder, iso.train(tiny(folder, **ENDED), show=False)


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Caches of the test's own, and no network."""
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/huggingface")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
