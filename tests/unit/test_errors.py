"""The meaning of other libraries' errors."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hetero_framework.core.files import NamingOf
from hetero_framework.errors import ResourceError, as_hetero_error, in_words


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
def test_memory_that_ran_out_is_recognised(text: str) -> None:
    assert isinstance(as_hetero_error(RuntimeError(text)), ResourceError)


def test_another_error_of_a_device_is_a_bug() -> None:
    assert as_hetero_error(RuntimeError("CUDA error: device-side assert triggered")) is None


def test_reasons_are_told_in_words(tmp_path: Path) -> None:
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
def test_a_file_that_the_system_refuses_is_named(code: str, of_rust: bool, tmp_path: Path) -> None:
    number = getattr(errno, code)
    raised = Exception(f"x (os error {number})") if of_rust else OSError(number, "x")
    with pytest.raises(OSError) as caught, NamingOf(tmp_path / "tokenizer.json"):
        raise raised
    known = as_hetero_error(caught.value)
    assert isinstance(known, ResourceError)
    assert "tokenizer.json" in known.message
