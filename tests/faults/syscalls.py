"""The system calls of a child process, one by one: observed, made to fail, or followed by its end.

Linux's seccomp hands each call to the parent, also those of libraries that are not Python
(safetensors writes its files itself). It needs no root, no tracer and no compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_AT_FDCWD = -100
_DEADLINE_S = 30.0
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of the listener
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000

# Where a call names its file: "fd" (argument 0), "path" (argument 0) or "at" (arguments 0 and 1).
# The numbers are those of x86_64 and aarch64; None where there is no such call.
_CALLS: dict[str, tuple[str, int | None, int | None]] = {
    "read": ("fd", 0, 63),
    "write": ("fd", 1, 64),
    "open": ("path", 2, None),
    "close": ("fd", 3, 57),
    "stat": ("path", 4, None),
    "fstat": ("fd", 5, 80),
    "lstat": ("path", 6, None),
    "mmap": ("fd at 4", 9, 222),
    "pread64": ("fd", 17, 67),
    "pwrite64": ("fd", 18, 68),
    "writev": ("fd", 20, 66),
    "fsync": ("fd", 74, 82),
    "fdatasync": ("fd", 75, 83),
    "ftruncate": ("fd", 77, 46),
    "rename": ("path", 82, None),
    "mkdir": ("path", 83, None),
    "rmdir": ("path", 84, None),
    "unlink": ("path", 87, None),
    "link": ("path", 86, None),
    "chmod": ("path", 90, None),
    "fchmod": ("fd", 91, 52),
    "getdents64": ("fd", 217, 61),
    "openat": ("at", 257, 56),
    "mkdirat": ("at", 258, 34),
    "newfstatat": ("at", 262, 79),
    "unlinkat": ("at", 263, 35),
    "renameat": ("at", 264, 38),
    "linkat": ("at", 265, 37),
    "fchmodat": ("at", 268, 53),
    "fallocate": ("fd", 285, 47),
    "renameat2": ("at", 316, 276),
    "statx": ("at", 332, 291),
}
LOOKS = frozenset(
    {"stat", "fstat", "lstat", "newfstatat", "statx", "read", "pread64", "mmap", "getdents64"}
)
"""Calls that change nothing."""


@dataclass(frozen=True)
class Call:
    """A call that a child is about to make on a file below the watched directory."""

    number: int  # from 1
    name: str
    path: Path
    pid: int
    fd: int | None

    @property
    def inode(self) -> int:
        """Of the open file. Only for calls that have one."""
        return os.stat(f"/proc/{self.pid}/fd/{self.fd}").st_ino


KILL = -1
"""An answer: the child is killed and the call does not happen."""
Answer = Callable[[Call], int | None]


def unsupported() -> str | None:
    """Why calls cannot be watched here."""
    if sys.platform != "linux" or platform.machine() not in _SECCOMP:
        return "needs Linux on x86_64 or aarch64"
    try:
        watch(Path("/nowhere"), lambda: 0, lambda call: None)
    except OSError as error:
        return f"seccomp cannot hand calls to a parent here: {error}"
    return None


def watch(below: Path, function: Callable[[], int], answer: Answer) -> int | None:
    """Run `function` in a fork and return what it returned, or None if it was killed.

    `answer` is asked about each call on a file below `below`: None lets it happen, an errno makes
    it fail, KILL ends the child. Raises OSError where the kernel refuses, AssertionError where the
    child raises or hangs.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _child(theirs, function)
    theirs.close()
    try:
        with ours:
            ours.settimeout(_DEADLINE_S)
            said, descriptors, _, _ = socket.recv_fds(ours, 64, 1)
        if not descriptors:
            raise OSError(int(said or b"0"), os.strerror(int(said or b"0")))
        try:
            _serve(descriptors[0], pid, below, answer)
        finally:
            os.close(descriptors[0])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died of {os.WTERMSIG(status)}"
        return None
    code = os.WEXITSTATUS(status)
    assert code != 255, "the child raised"
    return code


def _child(parent: socket.socket, function: Callable[[], int]) -> None:
    try:
        try:
            listener = _install()
        except OSError as error:
            parent.send(str(error.errno).encode())
            raise
        socket.send_fds(parent, [b"x"], [listener])
        os.close(listener)
        os._exit(function())
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(255)


def _install() -> int:
    """Have the calls of this thread and of those it starts wait for a listener; returns that."""
    column = 1 if platform.machine() == "x86_64" else 2
    numbers = [call[column] for call in _CALLS.values() if call[column] is not None]
    # Other architecture: allow. Load the number, jump to the last line where it is one of ours.
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, _AUDIT_ARCH[platform.machine()])]
    program += [(0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    left = len(numbers)
    program += [(0x15, left - index, 0, number) for index, number in enumerate(numbers)]
    program += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    filled = Program(len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_SECCOMP[platform.machine()])
    if libc.prctl(38, 1, 0, 0, 0) == 0:  # no new privileges
        listener = libc.syscall(number, 1, 8, ctypes.byref(filled))
        if listener >= 0:
            return int(listener)
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _serve(listener: int, pid: int, below: Path, answer: Answer) -> None:
    """Answer calls until the child has ended."""
    column = 1 if platform.machine() == "x86_64" else 2
    names = {call[column]: name for name, call in _CALLS.items()}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    deadline, count, prefix = time.monotonic() + _DEADLINE_S, 0, f"{below}/"
    while True:
        ready = poll.poll(1000)
        assert time.monotonic() < deadline, "the child hangs"
        if not ready:
            continue
        if not ready[0][1] & select.POLLIN:
            return
        request = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, request)
        except FileNotFoundError:  # the child has just ended
            continue
        ident, thread, _, number, _, _ = struct.unpack_from("=QIIiIQ", request)
        arguments = struct.unpack_from("=6Q", request, 32)
        name, decision = names[number], None
        path, fd = _file(thread, _CALLS[name][0], arguments)
        if path is not None and (str(path) == str(below) or str(path).startswith(prefix)):
            count += 1
            decision = answer(Call(count, name, path, thread, fd))
        if decision == KILL:
            os.kill(pid, signal.SIGKILL)
            continue
        go_on = decision is None
        reply = struct.pack("=QqiI", ident, 0, -(decision or 0), int(go_on))
        fcntl.ioctl(listener, _SEND, reply)


def _file(pid: int, kind: str, arguments: tuple[int, ...]) -> tuple[Path | None, int | None]:
    """The file that a call is about, and its descriptor where the call has one."""
    if kind.startswith("fd"):
        fd = arguments[4 if kind == "fd at 4" else 0] & 0xFFFFFFFF
        try:
            return Path(os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(" (deleted)")), fd
        except OSError:  # none, or not a descriptor
            return None, None
    text = _string(pid, arguments[1 if kind == "at" else 0])
    if text.startswith("/"):
        return Path(os.path.normpath(text)), None
    directory = ctypes.c_int(arguments[0] & 0xFFFFFFFF).value if kind == "at" else _AT_FDCWD
    base = "cwd" if directory == _AT_FDCWD else f"fd/{directory}"
    try:
        found = Path(os.readlink(f"/proc/{pid}/{base}"), text)
    except OSError:
        return None, None
    return Path(os.path.normpath(found)), directory if not text else None


def _string(pid: int, address: int) -> str:
    if address == 0:  # newer C libraries: the descriptor itself
        return ""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = b""
        while b"\0" not in content and len(content) < 4096:
            content += memory.read(256 - (address + len(content)) % 256)
    return os.fsdecode(content.split(b"\0")[0])
