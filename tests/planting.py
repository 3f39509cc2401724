"""Files that look as if another user of the machine had put them there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STRANGER = 12345


def plant(path: Path, how: str, elsewhere: Path) -> None:
    """Give a file or directory another owner (skips unless root), a mode for everybody or for a
    group (skips unless root), or have it be a link to `elsewhere`, or a file that is there, too."""
    if how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(path, STRANGER, -1)
    elif how == "group":
        if os.geteuid() != 0:
            pytest.skip("only root chooses the group")
        os.chown(path, -1, STRANGER)
        path.chmod(0o770 if path.is_dir() else 0o660)
    elif how == "mode":
        path.chmod(0o777 if path.is_dir() else 0o666)
    elif how == "link":
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    else:
        os.link(path, elsewhere)
