"""Ownership checks on files: refuses files that another user of the machine could have written.

A file is refused when it or a directory on the way to it belongs to another user or is writable by
everybody, or when a link leads out of the directory that is checked.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hetero_framework.errors import ConfigError


@dataclass(frozen=True)
class Untrusted:
    """The reason not to trust a file or directory, and what to do if the user trusts it."""

    problem: str
    mend: str


def read_own(path: Path, *, strictly: bool = False, most_bytes: int = 1 << 20) -> bytes:
    """The content of a small file that only this user can have written: the path is checked, then
    the open file. With `strictly`, for files that a process acts upon, no group of several users
    can have written it either, and nobody else can put files beside it. Raises OSError; a
    PermissionError says the problem and its remedy."""

    def check(place: Path, entry: os.stat_result | None = None) -> None:
        if (wrong := untrusted_reason(place, by_group=strictly, entry=entry)) is not None:
            text = f"{path.name} is not believed: {place} {wrong.problem}; {wrong.mend}"
            raise PermissionError(errno.EPERM, text)

    for place in (path.parent.resolve(), path) if strictly else (path,):
        check(place)
    with open(path, "rb", opener=not_through_links) as file:
        check(path, os.fstat(file.fileno()))
        if len(content := file.read(most_bytes + 1)) > most_bytes:
            raise OSError(errno.EFBIG, f"{path} has more than {most_bytes} bytes")
        return content


def not_through_links(path: str, flags: int) -> int:
    """The `opener` of `open` for files of a run. Except on Windows, a link is an OSError and a pipe
    is not waited for."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def untrusted_reason(
    path: Path, *, by_group: bool = False, entry: os.stat_result | None = None
) -> Untrusted | None:
    """The problem with a file or a directory, or None. With `by_group`, a group of several users
    that may change it is a problem too. `entry` is an open file's status. Raises OSError."""
    entry = entry or path.lstat()
    if stat.S_ISLNK(entry.st_mode):
        return Untrusted("is a symbolic link", f"put what it points to in its place: {path}")
    if not stat.S_ISREG(entry.st_mode) and not stat.S_ISDIR(entry.st_mode):
        return Untrusted("is neither a file nor a directory", f"remove it: {path}")
    if stat.S_ISREG(entry.st_mode) and entry.st_nlink > 1:
        copy = "copy the directory and use the copy: cp -r"
        return Untrusted(f"has {entry.st_nlink} names (hard links)", f"{copy} {path.parent} ...")
    if os.name == "nt":  # no modes, and owners are not numbers
        return None
    user, directory = os.geteuid(), _directory(path)
    if entry.st_uid not in (0, user):
        mend = f"if it is yours all the same: chown -R {user} {directory}"
        wrong = Untrusted(f"belongs to user {entry.st_uid}, and this is user {user}", mend)
    elif entry.st_mode & stat.S_IWOTH or (by_group and _group(path) and _admits_group(directory)):
        mend = f"if nobody has: chmod -R go-w {directory}"
        whom = "everybody" if entry.st_mode & stat.S_IWOTH else _group(path)
        wrong = Untrusted(f"can be changed by {whom} (mode {stat.S_IMODE(entry.st_mode):o})", mend)
    else:
        return None
    return None if _hides_owners(directory, entry) else wrong


def other_writers(directory: Path) -> str | None:
    """Other users that may put files into a directory; None where there are none, and where the
    system does not tell. Raises OSError."""
    if os.name == "nt":
        return None
    entry = directory.stat()
    if entry.st_uid not in (0, os.geteuid()):
        whom: str | None = f"user {entry.st_uid}, whose it is"
    else:
        whom = "everybody" if entry.st_mode & stat.S_IWOTH else _group(directory)
    return None if whom is None or _hides_owners(directory, entry) else whom


def refuse_link(path: Path, *, except_own: bool = False) -> None:
    """Raise ConfigError if a run would write through a link at `path`. `except_own`: a link that
    this user has made is allowed."""
    try:
        entry = path.lstat()
    except OSError:
        return
    is_own = os.name == "nt" or entry.st_uid in (0, os.geteuid())
    if stat.S_ISLNK(entry.st_mode) and not (except_own and is_own):
        whose = "" if is_own else f" of user {entry.st_uid}"
        raise ConfigError(
            f"training.output_dir: {path} is a symbolic link{whose}, and no run writes through it",
            hint="remove the link, or choose another directory: --output-dir DIR",
        )


def _group(path: Path) -> str | None:
    """The group that may write to `path`; None if there is none, or if it is the owner's own."""
    entry = path.stat()
    if not entry.st_mode & stat.S_IWGRP:
        return None
    try:
        name = path.group()
        return f"group {name}" if name != path.owner() else None
    except KeyError:
        return f"group {entry.st_gid}"


def _admits_group(directory: Path) -> bool:
    return bool(directory.stat().st_mode & stat.S_IXGRP)


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _hides_owners(directory: Path, entry: os.stat_result) -> bool:
    """Whether the file system gives all files one owner and one mode, as FAT and some network disks
    do. There a new file, made for this user alone, shows the same owner or mode."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            new = os.fstat(file.fileno())
    except OSError:
        return False
    if entry.st_uid not in (0, os.geteuid()):
        return new.st_uid == entry.st_uid
    return bool(new.st_mode & entry.st_mode & (stat.S_IWOTH | stat.S_IWGRP))
