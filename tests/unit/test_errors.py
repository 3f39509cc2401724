"""The meaning of other libraries' errors."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, cast

import pytest

from hetero_framework import control
from hetero_framework.core.devices import Device
from hetero_framework.core.files import NamingOf, write_json
from hetero_framework.engine import out_of_memory
from hetero_framework.errors import (
    ConfigError,
    HeteroError,
    ResourceError,
    UserError,
    as_hetero_error,
    in_words,
    of_disk,
)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "HIP out of memory",
        "MPS backend out of memory (MPS allocated: 17.9 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_memory_that_ran_out_is_recognised(text):
    assert isinstance(as_hetero_error(RuntimeError(text)), ResourceError)


def test_another_error_of_a_device_is_a_bug():
    assert as_hetero_error(RuntimeError("CUDA error: device-side assert triggered")) is None


def test_reasons_are_told_in_words(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xe9")
    found = []
    for path in (tmp_path / "absent", tmp_path, tmp_path / "latin"):
        try:
            path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found.append(in_words(error))
    assert found[0] == "No such file or directory"
    assert found[2] == "it is no text in UTF-8"
    assert [in_words(KeyError("step")), in_words(OSError("gone"))] == ["it lacks 'step'", "gone"]
    assert not any("Errno" in text for text in found)


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "ENAMETOOLONG"])
@pytest.mark.parametrize("of_rust", [False, True])
def test_a_file_that_the_system_refuses_is_named(code, of_rust, tmp_path):
    number = getattr(errno, code)
    raised = Exception(f"x (os error {number})") if of_rust else OSError(number, "x")
    with pytest.raises(OSError) as caught, NamingOf(tmp_path / "tokenizer.json"):
        raise raised
    known = as_hetero_error(caught.value)
    assert isinstance(known, ResourceError)
    assert "tokenizer.json" in known.message


FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


def test_a_full_disk_is_told_in_words_whoever_tells_it():
    assert in_words(Exception(FULL)) == "No space left on device"
    assert isinstance(as_hetero_error(Exception(FULL)), ResourceError)
    assert of_disk(OSError(errno.ENOSPC, "x"), ConfigError) is ResourceError
    assert of_disk(OSError(errno.EFBIG, "x"), ConfigError) is ResourceError
    assert of_disk(OSError(errno.EACCES, "x"), ConfigError) is ConfigError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # What `tempfile` raises where no folder has room.
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 6),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/run/x"), 6),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused", "/run/x.sock"), None),
        (OSError(errno.EADDRINUSE, "Address already in use"), None),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), None),
        (ProcessLookupError(errno.ESRCH, "No such process"), None),
        (ModuleNotFoundError("No module named 'x'", name="x", path="/x.py"), None),
        (RuntimeError("Connection refused (os error 111)"), None),
    ],
)
def test_what_is_no_file_of_the_system_stays_a_bug(error, code):
    assert getattr(as_hetero_error(error), "exit_code", None) == code


def test_a_file_that_the_users_own_code_misses_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_imported", [Path(__file__)])
    with pytest.raises(OSError) as caught:
        (tmp_path / "weights.txt").read_text()
    told = out_of_memory.failed("stage 0", caught.value, Device(), cast(Any, None))
    assert type(told) is UserError
    assert "test_errors.py, line" in told.message


def test_json_on_a_full_disk_ends_with_the_path(tmp_path, monkeypatch):
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for kind in (UserError, HeteroError):
        with pytest.raises(ResourceError, match=r"cannot write .*c\.json: No space left"):
            write_json(tmp_path / "c.json", {}, kind)
    assert not list(tmp_path.iterdir())
