"""The wheel has everything that isomorph needs to run, and nothing else; it works where no repository is around."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import isomorph as iso

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    pytest.importorskip("hatchling", reason="make env installs build and hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    return folder


def sources():
    """Every file of the package in the repository, except caches."""
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        files = {info.filename: info.file_size for info in wheel.infolist()}
    metadata = {name for name in files if ".dist-info/" in name}
    assert files.keys() - metadata == sources()
    for suffix in (".j2", ".js", ".css", ".npz", "py.typed"):
        assert any(name.endswith(suffix) for name in files), suffix
    assert max(files.values()) < 2**20, "large files do not belong into the package"


@pytest.mark.slow
def test_sdist_has_tests_docs_and_examples_but_no_data(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {"README.md", "LICENSE", "CITATION.cff", "pyproject.toml", "tests/test_package.py", "docs/index.md"}
    assert expected | {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= names
    foreign = {name for name in names if name.startswith(("shared/", "runs/", "site/", ".")) and name != ".gitignore"}
    assert not foreign, foreign


@pytest.mark.slow
def test_metadata(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
    for method in ("T-CNN", "ConViT", "TDRL", "Refiner", "CoAtNet", "timm"):
        assert method in metadata["Summary"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == iso.__version__
    assert metadata.get_payload().lstrip().startswith("# isomorph")


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of an environment with the wheel, in which the other packages of this environment are visible."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read again
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", str(next(built.glob("*.whl")))], check=True, capture_output=True)
    return programs


COMMANDS = """
import sys
from isomorph.cli import main

for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as ended:
        assert not ended.code, ended.code
"""
"""Runs several commands in one process: importing torch takes longer than they do."""


@pytest.mark.slow
def test_wheel_works_in_an_empty_folder(installed, tmp_path):
    image = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(image)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ISOMORPH_DATA")}

    def run(*command):
        done = subprocess.run(
            [str(installed / command[0]), *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "from importlib.util import find_spec; print(find_spec('isomorph').origin)"
    assert str(installed.parent) in run("python", "-c", where)
    assert iso.__version__ in run("isomorph", "--version")
    assert "coatnet_7" in run("isomorph", "models")
    recast = "recast cifar_resnet20 --no-pretrained --where layer3.0.conv2 --out tcnn.safetensors"
    analyze = "analyze tcnn.safetensors --image x.png --out page.html"
    assert "tcnn.safetensors" in run("python", "-c", COMMANDS, recast, analyze)
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_citation_names_the_version_and_the_five_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == iso.__version__ == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert len(citation["references"]) == 5
    page = (ROOT / "docs" / "citing.md").read_text()
    assert "(docs/citing.md)" in (ROOT / "README.md").read_text()
    for paper in citation["references"]:
        words = paper["title"].split(":")[-1].split()[-3:]
        assert all(word in page for word in words), paper["title"]


def test_extras_that_messages_and_docs_name_exist():
    texts = [path.read_text() for folder in ("src", "docs") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    for text in [*texts, (ROOT / "README.md").read_text()]:
        for extras in re.findall(r"isomorph\[([a-z,]+)\]", text):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), extras
