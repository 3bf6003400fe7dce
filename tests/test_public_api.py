"""What is public: named in `__all__`, documented with an example that runs, typed for users."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch

import isomorph as iso
from refusals import refused

NAMESPACES = (
    "analysis",
    "data",
    "deployment",
    "evaluation",
    "layers",
    "report",
    "surgery",
    "training",
)
"""Namespaces whose names users call; `iso.models` is reached through timm's registry."""


def public_names() -> dict[str, object]:
    """Classes and functions that users call, by their names below `iso`."""
    found = {name: getattr(iso, name) for name in iso.__all__}
    for namespace in NAMESPACES:
        found |= {
            f"{namespace}.{name}": getattr(found[namespace], name)
            for name in found[namespace].__all__
        }
    return {name: value for name, value in found.items() if callable(value)}


PUBLIC = public_names()
EXAMPLES = {id(value): name for name, value in PUBLIC.items()}.values()
"""One name of each: `iso.recast` is `iso.surgery.recast`."""


def test_a_namespace_shows_its_public_names_only():
    assert dir(iso) == sorted(iso.__all__)
    for namespace in NAMESPACES:
        assert isinstance(getattr(iso, namespace), ModuleType)
        assert dir(getattr(iso, namespace)) == sorted(getattr(iso, namespace).__all__)


def test_a_misspelt_name_is_said():
    with pytest.raises(
        AttributeError, match=r"no attribute 'ConvToGSPA'; did you mean ConvToGPSA\?"
    ):
        _ = iso.ConvToGSPA
    refused(
        r"no argument 'corruption'; did you mean corruptions\?",
        iso.robustness,
        None,
        corruption=["fog"],
    )
    layer = torch.nn.Linear(2, 2)
    refused(
        "where is a Linear; give the name",
        iso.recast,
        torch.nn.Sequential(layer),
        iso.LinearToPyramid(),
        layer,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(PUBLIC[name]) or ""
    globals_ = {"iso": iso, "timm": timm, "torch": torch}
    example = doctest.DocTestParser().get_doctest(text, globals_, name, None, None)
    assert example.examples, f"iso.{name} has no example"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    torch.manual_seed(0)
    lines: list[str] = []
    assert doctest.DocTestRunner(optionflags=options).run(example, out=lines.append).failed == 0, (
        "".join(lines)
    )


SCRIPT = """
import timm
import torch

import isomorph as iso

cnn: torch.nn.Module = timm.create_model("cifar_resnet20")
tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
report = iso.verify(cnn, tcnn, torch.randn(2, 3, 32, 32))
deviation: float = report.fp64
wide = iso.recast(cnn, iso.LinearToPyramid("P-W2S"), where="linear")
thin: torch.nn.Module = iso.fuse(wide.eval())
iso.save(tcnn, "tcnn.safetensors")
back: torch.nn.Module = iso.load("tcnn.safetensors")
spans: dict[str, torch.Tensor] = iso.analysis.attention_spans(back)
maps: dict[str, torch.Tensor] = iso.attention_maps(back, torch.randn(1, 3, 32, 32))
recipe: iso.Recipe = iso.load_recipe("digits_cnn", ["epochs=1"])
layer = iso.layers.GPSA2d(8, 8, 3)
"""
WRONG = """
import isomorph as iso

iso.recast("resnet50", iso.ConvToGPSA(), where="*")
iso.ConvToGPSA(inits="exact")
"""

UNREAD = (
    *(
        "timm",
        "torchvision",
        "datasets",
        "sklearn",
        "scipy",
        "cv2",
        "numba",
        "pyarrow",
        "PIL",
        "pandas",
        "sympy",
    ),
    *(
        "torchmetrics",
        "imagecorruptions",
        "webdataset",
        "tensorboard",
        "onnx",
        "onnxruntime",
        "onnxscript",
    ),
    *("transformers", "tokenizers", "diffusers", "pycocotools", "torch_fidelity"),
    *(
        "huggingface_hub",
        "httpx",
        "httpcore",
        "anyio",
        "click",
        "filelock",
        "matplotlib",
        "pyparsing",
        "onnx_ir",
    ),
    *("rich", "numpy", "jinja2", "cyclopts", "yaml", "triton", "networkx", "mpmath"),
    *(
        "torch._dynamo",
        "torch._inductor",
        "torch._functorch",
        "torch._export",
        "torch._refs",
        "torch._decomp",
    ),
    *(
        "torch._prims",
        "torch._higher_order_ops",
        "torch._subclasses",
        "torch._numpy",
        "torch.fx",
        "torch.distributed",
    ),
    *(
        "torch.onnx",
        "torch.export",
        "torch.ao",
        "torch.jit",
        "torch.sparse",
        "torch.testing",
        "torch.masked",
    ),
    *("torch.nested", "torch.profiler", "torch.cuda", "torch.xpu", "torch.mps"),
    *(
        "torch.distributions",
        "torch.package",
        "torch._native",
        "torch._library",
        "torch._precompile",
    ),
    *(
        "torch._torch_docs",
        "torch._tensor_docs",
        "torch.linalg",
        "torch.overrides",
        "torch.compiler",
    ),
)
"""Packages that say nothing about the types of isomorph's public names; reading them takes mypy as long again."""


@pytest.mark.slow
def test_a_users_script_passes_strict_mypy(tmp_path):
    unread = ",".join(f"{package}.*" for package in UNREAD)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\n[mypy-{unread}]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [
        "-m",
        "mypy",
        "--strict",
        "--no-incremental",
        "--follow-imports=silent",
        "right.py",
        "wrong.py",
    ]
    sources = str(Path(iso.__file__).parents[1])
    environment = {"MYPYPATH": sources, "PATH": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "right.py" not in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("wrong.py") == done.stdout.count("error:") == 2, (
        done.stdout + done.stderr
    )
