"""The wheel's files and metadata."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hetero_framework import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")  # a build writes beside its sources
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "hetero_framework",
        source / "hetero_framework",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(ROOT / "examples" / "recipes", source / "examples" / "recipes")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *offline, "--wheel-dir", source, source], check=True, timeout=120)
    with zipfile.ZipFile(next(source.glob("*.whl"))) as wheel:
        yield wheel


def test_wheel_holds_every_file_of_the_package(wheel):
    files = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "hetero_framework").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert files <= set(wheel.namelist())
    assert "hetero_framework/py.typed" in files
    others = {name.partition("/")[0] for name in wheel.namelist()} - {"hetero_framework"}
    assert [name for name in others if not name.endswith((".dist-info", ".data"))] == []  # no tests
    recipes = {name.rpartition("/recipes/")[2] for name in wheel.namelist() if ".data/" in name}
    assert recipes == {file.name for file in (ROOT / "examples" / "recipes").iterdir()}


def test_the_wheel_has_its_metadata(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    said = email.message_from_bytes(wheel.read(name))
    assert said["Version"] == __version__
    assert said["Author"]
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert said.get_all("Project-URL") is None  # there is no public address yet


@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_sleep_while_they_wait(given, used):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    code = "import os, hetero_framework; print(os.environ['OMP_WAIT_POLICY'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [used]
