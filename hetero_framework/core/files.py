"""Atomic replacement of files and directories: a crash leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetero_framework.core import timeouts
from hetero_framework.errors import HeteroError, UserError, of_disk, of_system

PICTURES = (".png", ".svg", ".pdf", ".mmd")
# Windows: access denied, sharing violation, lock violation: scanners hold fresh files open.
_BUSY = (5, 32, 33)


def rename(source: Path, target: Path) -> None:
    """`os.replace` that waits a few seconds for programs that hold a file open on Windows."""
    deadline = time.monotonic() + timeouts.FILE_BUSY_S
    while True:
        try:
            os.replace(source, target)
        except PermissionError as error:
            if getattr(error, "winerror", None) not in _BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def refuse_output(path: Path, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise UserError if `path` exists and may not be replaced: without `overwrite`, or if it is
    not a file, is one of `inputs`, or is in a directory of `inputs` and no picture. A link counts
    as a file; its target stays."""
    hint = "choose another file"
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise UserError(f"{path} is not a file that can be written", hint=hint)
    if not os.path.lexists(path):
        return
    read = [one for one in inputs if one.exists()]
    inside = [one for one in read if one.is_dir() and path.suffix not in PICTURES]
    if any(path.exists() and path.samefile(one) for one in read) or any(
        path.resolve().is_relative_to(one.resolve()) for one in inside
    ):
        raise UserError(f"{path} is read by this command; it will not be replaced", hint=hint)
    if not overwrite:
        raise UserError(f"{path} exists already", hint=f"replace it with --overwrite, or {hint}")


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and its folders where they are missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with NamingOf(path):  # a write or a flush names no file
            unfinished.write_bytes(content)
            sync_file(unfinished)
            rename(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


class NamingOf(contextlib.AbstractContextManager[None]):
    """Raises the system's errors within the block as OSErrors that name `path`, also errors that a
    Rust library reports only as text."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if (refusal := of_system(error)) is not None:
            refusal.filename = refusal.filename or str(self._path)
            if refusal is not error:
                raise refusal from error


def write_json(path: Path, value: Any, error: type[HeteroError] = UserError) -> None:
    """Write JSON that people read. Raises `error` where that is not possible, ResourceError where
    the disk is full."""
    try:
        write_file(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
    except OSError as why:
        raise of_disk(why, error)(f"cannot write {path}: {why.strerror or why}") from why


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, in a folder that exists. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as output:
            output.write(content)
            output.flush()
            os.fsync(output.fileno())
        rename(unfinished, path)
        sync_directory(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


WRITTEN, _COMPLETE = ".rotating", "rotated"


def replace_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Give several private files of a directory new contents, in one step: a crash leaves all of
    the old ones or all of the new ones. Raises OSError and leaves the old ones. The caller keeps
    other processes from writing there.

    The new files are written into a subfolder, which counts once it has its final name.
    `finish_replacing` then moves them to their places, in the order of `contents`.
    """
    written = directory / WRITTEN
    discard(written)
    written.mkdir(mode=0o700)
    try:
        for number, (name, content) in enumerate(contents.items()):
            write_private(written / f"{number:03}-{name}", content)
        rename(written, directory / _COMPLETE)
    finally:
        discard(written)
    sync_directory(directory)
    finish_replacing(directory)


def finish_replacing(directory: Path) -> None:
    """Finish an interrupted `replace_files`: move complete files to their places, delete others.
    Raises OSError."""
    complete = directory / _COMPLETE
    if complete.is_dir():
        for name in sorted(os.listdir(complete)):
            rename(complete / name, directory / name.partition("-")[2])
        sync_directory(directory)
        complete.rmdir()
    discard(directory / WRITTEN)


def is_half_replaced(directory: Path) -> bool:
    """Whether `finish_replacing` has to be called before the files of a directory are read."""
    return (directory / _COMPLETE).is_dir()


def replace_directory(new: Path, target: Path, old: Path, *, lasting: bool = True) -> None:
    """Give the complete directory `new` the name `target`. What stood there is called `old` for a
    moment and then deleted. Where that fails, raises OSError and leaves both as they were. Linux
    exchanges the two at once; elsewhere a process that is killed in between leaves `old` for
    `put_back`. Unless `lasting`, a power cut may undo it."""
    replaced = target.exists()
    if replaced and _exchange(new, target):
        with contextlib.suppress(OSError):
            rename(new, old)  # `new` is now the old directory
        if lasting:
            sync_directory(target.parent)
        for replaced_one in (old, new):
            discard(replaced_one)
        return
    if replaced:
        rename(target, old)
    try:
        rename(new, target)
    except OSError:
        put_back(target, old)
        raise
    if lasting:
        sync_directory(target.parent)
    if replaced:
        discard(old)


def discard(directory: Path) -> None:
    """Delete a directory that is not needed, as far as possible."""
    with contextlib.suppress(OSError):  # closing it can fail in spite of `ignore_errors`
        if directory.is_symlink():
            directory.unlink()
        shutil.rmtree(directory, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths' names atomically; False where the system cannot. Raises OSError."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    here, names = ctypes.c_int(-100), [os.fsencode(path.absolute()) for path in (one, other)]
    if libc.renameat2(here, names[0], here, names[1], ctypes.c_uint(2)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # an old kernel, a network disk
        return False
    raise OSError(code, os.strerror(code), str(one))


def put_back(target: Path, old: Path) -> bool:
    """Undo an interrupted `replace_directory`: rename `old` to `target` where that is missing.
    Returns whether it did. The caller deletes an `old` that stands beside a `target`."""
    if target.exists() or not old.is_dir():
        return False
    rename(old, target)
    return True


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with path.open("r+b") as file:  # Windows flushes only files opened for writing
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the directory's names are on the disk."""
    if os.name == "nt":  # directories cannot be opened there; NTFS journals renames itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
