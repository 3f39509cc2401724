"""Whether nobody but this user can have written a file: what others could plant is not read.

Links lead out of the directory that is looked at, and another owner or a mode that lets everybody
write means that another user of the machine may have made the content.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """Why a file or directory is not trusted, and what to do when it is all right nevertheless."""

    problem: str
    mend: str


def planted(path: Path) -> Planted | None:
    """What is wrong with a file or a directory; None where nothing is. Raises OSError."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Planted("is a symbolic link", f"put what it points to in its place: {path}")
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        copy = "copy the directory and use the copy: cp -r"
        return Planted(f"has {found.st_nlink} names (hard links)", f"{copy} {path.parent} ...")
    if os.name == "nt":  # no modes, and owners are not numbers
        return None
    own = os.geteuid()
    if found.st_uid not in (0, own):
        mend = f"if it is yours all the same: chown -R {own} {_directory(path)}"
        wrong = Planted(f"belongs to user {found.st_uid}, and this is user {own}", mend)
    elif found.st_mode & stat.S_IWOTH:
        mend = f"if nobody has: chmod -R go-w {_directory(path)}"
        mode = stat.S_IMODE(found.st_mode)
        wrong = Planted(f"can be changed by everybody (mode {mode:o})", mend)
    else:
        return None
    return None if _says_nothing_here(_directory(path), found) else wrong


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _says_nothing_here(directory: Path, found: os.stat_result) -> bool:
    """Whether a new file looks alike, which was made for this user alone: FAT, and network disks
    that give all files one owner and one mode."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            new = os.fstat(file.fileno())
    except OSError:
        return False
    if found.st_uid not in (0, os.geteuid()):
        return new.st_uid == found.st_uid
    return bool(new.st_mode & stat.S_IWOTH)
