"""The wheel has everything that isomorph needs to run, and nothing else; it works where no repository is around."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from PIL import Image

import isomorph as iso
from requirements import optional

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    optional("hatchling", "dev")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    return folder


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package_and_its_metadata(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        sizes = {info.filename: info.file_size for info in wheel.infolist()}
        about = {name for name in sizes if ".dist-info/" in name}
        metadata = message_from_bytes(
            wheel.read(next(name for name in about if name.endswith("METADATA")))
        )
    files = (
        path
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    assert sizes.keys() - about == {path.relative_to(ROOT / "src").as_posix() for path in files}
    for suffix in (".j2", ".js", ".css", ".npz", "py.typed"):
        assert any(name.endswith(suffix) for name in sizes), suffix
    assert max(sizes.values()) < 2**20, "large files do not belong into the package"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == iso.__version__
    description = metadata.get_payload()
    source = PROJECT["urls"]["Source"]
    assert description.startswith("# isomorph")
    targets = re.findall(r"\]\(([^)]+)\)", description)
    # PyPI shows relative links broken
    for target in targets:
        assert target.startswith("https://")
    assert f"{source}/raw/v{iso.__version__}/docs/pictures/analyze.png" in targets
    for page in ("README.md", "docs/start/install.md"):
        assert f"git clone {source} " in (ROOT / page).read_text()


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
def test_wheel_works_in_an_empty_folder(built, tmp_path):
    """In an environment with the wheel, in which the other packages of this environment are visible."""
    home = tmp_path / "environment"
    folder = tmp_path / "empty"
    folder.mkdir()
    venv.create(home, with_pip=False)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    site = sysconfig.get_path("purelib", vars={"base": str(home)})
    # its own .pth files are not read again
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(programs / "python"),
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run(
        [*pip, "--force-reinstall", str(next(built.glob("*.whl")))], check=True, capture_output=True
    )
    Image.new("RGB", (32, 32), (200, 100, 50)).save(folder / "x.png")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ISOMORPH_DATA")}

    def run(program, *arguments):
        command = [str(programs / program), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(home) in run(
        "python", "-c", "from importlib.util import find_spec; print(find_spec('isomorph').origin)"
    )
    assert iso.__version__ in run("isomorph", "--version")
    recast = "recast cifar_resnet20 --no-pretrained --where layer3.0.conv2 --out tcnn.safetensors"
    analyze = "analyze tcnn.safetensors --image x.png --out page.html"
    assert "tcnn.safetensors" in run("python", "-c", COMMANDS, recast, analyze)
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_classifiers_name_the_versions_of_the_matrix():
    versions = {row["python"] for row in json.loads((ROOT / ".github" / "matrix.json").read_text())}
    assert set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))) == versions


def test_citation_names_the_version_and_the_five_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == iso.__version__ == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert len(citation["references"]) == 5
    page = (ROOT / "docs" / "citing.md").read_text()
    for paper in citation["references"]:
        assert all(word in page for word in paper["title"].split(":")[-1].split()[-3:]), paper[
            "title"
        ]
