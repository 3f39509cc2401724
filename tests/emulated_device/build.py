"""Builds the emulated device, once for each version of torch, with torch's extension builder."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
MODULE = "emulated_device"
TIMEOUT_S = 600


def why_not() -> str | None:
    """Why the device cannot be built on this machine; None where it can."""
    if not sys.platform.startswith("linux"):
        return "the emulated device maps memory as Linux does"
    if torch.version.cuda or torch.version.hip:
        return "the emulated device takes the place of CUDA: it needs a CPU build of torch"
    if shutil.which("c++") is None:
        return "no C++ compiler is found (Debian and Ubuntu: apt install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are missing (Debian and Ubuntu: apt install python3-dev)"
    return None


def build(into: Path) -> Path:
    """The built library, in a folder of `into` that belongs to this source, Python and torch.

    Raises RuntimeError with the compiler's output when it cannot be built."""
    text = f"{torch.__version__} {sys.version} {platform.machine()}".encode() + SOURCE.read_bytes()
    folder = into / hashlib.sha256(text).hexdigest()[:16]
    library = folder / f"{MODULE}.so"
    if library.exists():
        return library
    work = folder / "build"
    work.mkdir(parents=True, exist_ok=True)
    arguments = ["build_ext", "--build-lib", str(work), "--build-temp", str(work)]
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    # Not in the repository, whose pyproject.toml an older setuptools cannot read.
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated device cannot be built:\n{done.stderr[-4000:]}")
    next(work.glob(f"{MODULE}*.so")).replace(library)
    shutil.rmtree(work)
    return library


def _main() -> None:
    from setuptools import setup
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(
        MODULE, [str(SOURCE)], extra_compile_args=["-O0", "-g0", "-w"], py_limited_api=False
    )
    builder = BuildExtension.with_options(use_ninja=False)
    setup(name=MODULE, ext_modules=[extension], cmdclass={"build_ext": builder})


if __name__ == "__main__":
    _main()
