"""Starts, describes and ends child processes, each with a life line.

A child's standard input is its life line, a pipe that only the parent holds open. It closes when
the parent ends, in any way and on any system, and then the child ends too.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

import hetero_framework
from hetero_framework.cluster import oom_killer
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.errors import PeerLostError

PROGRAM = (sys.executable, "-m", "hetero_framework", "worker")
_PASSED = re.compile(
    # where things are, and how this user writes
    r"PATH|HOME|USER|LOGNAME|LANG(UAGE)?|LC_\w+|TZ|TMPDIR|TE?MP|XDG_\w+|VIRTUAL_ENV|CONDA_\w+"
    r"|(LD|DYLD)_\w+|LIB(RARY_?PATH|PATH)?|\w*INCLUDE(_PATH)?|CPATH|CC|CXX|__CF_USER_TEXT_ENCODING"
    r"|SYSTEM(ROOT|DRIVE)|WINDIR|COMSPEC|PATHEXT|OS|(LOCAL)?APPDATA|USER(PROFILE|NAME)|ALLUSERSPROFILE"
    r"|HOME(DRIVE|PATH)|(COMMON)?PROGRAM(DATA|FILES|W6432)(\(X86\))?|PUBLIC|PROCESSOR_\w+"
    r"|NUMBER_OF_PROCESSORS|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|COVERAGE_\w+|COV_CORE_\w+"
    # Python, this package, and the libraries below
    r"|(PYTHON|TORCH)\w*|(HETERO|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|SAFETENSORS|PYTORCH|TRITON"
    r"|BNB|BITSANDBYTES|OMP|GOMP|MKL|KMP|OPENBLAS|VECLIB|NUMEXPR|ATEN|DNNL|ONEDNN|MALLOC|CUDA|NVIDIA"
    r"|CUBLAS|CUDNN|NCCL|GLOO|HIP|ROCR|ROCM|RCCL|HSA|MIOPEN|AMD|GPU|ZE|SYCL|ONEAPI|MPS|MTL)_\w+",
    re.IGNORECASE,
)
"""Environment variables that a worker gets, unless they are named like a secret. A variable of the
user's own passes if it begins with HETERO_."""
_SECRET = re.compile(
    r"(\w*_)?(API|ACCESS|PRIVATE|SECRET|AUTH|PASS|KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
    r"|APIKEY|OIDC|JWT|COOKIE|DSN)S?(_\w*)?",
    re.IGNORECASE,
)
_HUB = re.compile(
    r"HF_(TOKEN(_PATH)?|OIDC_\w+)|HUGGING_FACE_HUB_TOKEN|ACTIONS_ID_TOKEN_\w+|\w+_PROXY",
    re.IGNORECASE,
)
"""Further variables for a model of the hub or an upload; a proxy's address may hold a password."""


def environment(*, hub_token: bool = True) -> dict[str, str]:
    """Environment variables of a child that runs this package: all that it needs, and no other
    secrets."""
    paths = [str(Path(hetero_framework.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if (_PASSED.fullmatch(name) and not _SECRET.fullmatch(name))
            or (hub_token and _HUB.fullmatch(name))
        },
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONSAFEPATH": "1",  # `-m` would import the modules of the current directory first
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    }


def start(
    command: Sequence[str], env: dict[str, str], stdout: IO[bytes] | int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, so that Ctrl-C reaches the parent only."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=os.name != "nt",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def serving(worker_id: WorkerId, port: int) -> int | None:
    """The id of this user's process that serves as this worker on `port`; None if the system shows
    none."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--worker-id" not in words[:-1] or process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            listens = any(
                c.status == psutil.CONN_LISTEN and c.laddr.port == port
                for c in process.net_connections("tcp")
            )
            if listens and words[words.index("--worker-id") + 1] == str(worker_id):
                return process.pid
    return None


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Close the life lines, wait `grace_s` in all, then kill."""
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(timeouts.STOP_S)


def describe_exit(code: int) -> str:
    """`exit code 2`, or `signal SIGKILL` for a negative number as subprocess gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def describe_end(pid: int, code: int, kills: int | None) -> str:
    """`describe_exit`, and after SIGKILL the reason, if the system tells it. `kills` is an earlier
    value of `out_of_memory_kills`."""
    if code == -getattr(signal, "SIGKILL", 0) and code:
        return f"{describe_exit(code)} ({oom_killer.on_kill(pid, kills)})"
    return describe_exit(code)


def watch_parent(
    on_gone: Callable[[], None] | None = None, on_order: Callable[[str], None] = lambda reason: None
) -> threading.Thread:
    """In a child: call `on_gone` when the parent has ended (default: end the process),
    and `on_order` with each line of the parent, which is a reason to end."""

    def wait() -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := os.read(0, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_order(line.decode("utf-8", "replace"))
        if on_gone is None:
            os._exit(PeerLostError.exit_code)  # the main thread may be deep inside a computation
        on_gone()

    thread = threading.Thread(target=wait, name="watch-parent", daemon=True)
    thread.start()
    return thread
