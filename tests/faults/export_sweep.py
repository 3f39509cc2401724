"""A result is written while its n-th system call is the last one, or fails; for every n.

Whoever looks afterwards finds the result that was there before (or none) or the new one, byte for
byte, and files of others as they were; the next write succeeds and leaves nothing behind.

    python -m tests.faults.export_sweep [every n-th point]
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hetero_framework.errors import ResourceError
from hetero_framework.models.export import OutputDirectory, write_checkpoint
from tests.faults.checkpoint_sweep import _GROWS, MODES, REFUSED, WRITTEN, WRITTEN_AGAIN, PowerCut
from tests.faults.syscalls import KILL, LOOKS, Call, unsupported, watch

Tree = dict[str, bytes]
CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
)


class Writer:
    """Writes a whole model, as a run does at its end, into two weight files."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()

    def write(self, root: Path, value: float) -> None:
        parts = [{name: torch.full_like(t, value)} for name, t in self._weights.items()]
        output = OutputDirectory(root / "model", overwrite=True)
        write_checkpoint(output, parts, CONFIG, max_file_bytes=1024)

    def attempt(self, root: Path) -> int:
        """As a run does: a result that cannot be written is tried again."""
        for result in (WRITTEN, WRITTEN_AGAIN):
            with contextlib.suppress(ResourceError):
                self.write(root, 2.0)
                return result
        return REFUSED


def nothing(root: Path, writer: Writer) -> None:
    root.mkdir()


def an_older_one(root: Path, writer: Writer) -> None:
    root.mkdir()
    writer.write(root, 1.0)
    (root / "model" / "notes.txt").write_text("of the user")


def an_older_one_after_a_kill(root: Path, writer: Writer) -> None:
    an_older_one(root, writer)
    shutil.copytree(root / "model", root / ".model.partial")
    (root / "model").rename(root / ".model.old")


SCENES: dict[str, Callable[[Path, Writer], None]] = {
    "the first result": nothing,
    "over an older one": an_older_one,
    "after a kill between two renames": an_older_one_after_a_kill,
}


def tree(directory: Path) -> Tree | None:
    """Names and bytes; of what a kill left between two renames, too. None for none."""
    if not directory.is_dir():
        replaced = directory.with_name(f".{directory.name}.old")
        return tree(replaced) if replaced.is_dir() else None
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def sweep(base: Path, every: int) -> dict[str, Counter[str]]:
    """Every scene, every mode, every n-th point: how often the old and the new result is found."""
    writer, results = Writer(), {}
    for scene, prepare in SCENES.items():
        start, done = base / "start", base / "done"
        prepare(start, writer)
        old = tree(start / "model")
        shutil.copytree(start, done)
        writer.write(done, 2.0)
        new = tree(done / "model")
        for mode in MODES:
            counts: Counter[str] = Counter()
            results[f"{scene}: {mode}"] = counts
            number = 1
            while True:
                root = base / "case"
                shutil.copytree(start, root)
                try:
                    reached, outcome = _case(root, writer, (old, new), mode, number)
                except (AssertionError, ResourceError) as error:
                    reached, outcome = True, f"{scene}, {mode} at call {number}: {error}"
                shutil.rmtree(root)
                if not reached:
                    break
                counts["points"] += 1
                counts[outcome] += 1
                number += every
        shutil.rmtree(start)
        shutil.rmtree(done)
    return results


def _case(
    root: Path, writer: Writer, trees: tuple[Tree | None, Tree | None], mode: str, number: int
) -> tuple[bool, str]:
    """Whether the child got as far as that call, and which result is there."""
    cut = PowerCut(root)
    reached = False
    changes = 0

    def answer(call: Call) -> int | None:
        nonlocal changes, reached
        cut.note(call)
        if call.name in LOOKS:
            return errno.EIO if mode == "EIO from then on" and reached else None
        changes += 1
        if changes < number or (changes > number and not mode.endswith("from then on")):
            return None
        reached = True
        if mode in ("kill", "power cut"):
            return KILL
        if mode == "ENOSPC from then on" and call.name not in _GROWS:
            return None
        return int(getattr(errno, mode.split()[0]))

    result = watch(root, lambda: writer.attempt(root), answer)
    if not reached:
        assert result == WRITTEN
        return False, ""
    if mode == "power cut":
        cut.fall()
    if result is not None and not mode.endswith("from then on"):
        assert result in (WRITTEN, WRITTEN_AGAIN), "the write after the failed one fails, too"
    found, (old, new) = tree(root / "model"), trees
    assert found in (old, new), "neither the old nor the new result"
    outcome = "new" if found == new else "old"
    assert outcome == "new" or result not in (WRITTEN, WRITTEN_AGAIN), "said to be written"
    writer.write(root, 2.0)  # the next run
    assert tree(root / "model") == new
    assert [path.name for path in root.iterdir()] == ["model"]
    return True, outcome


def main() -> None:
    if problem := unsupported():
        sys.exit(problem)
    logging.getLogger("hetero_framework").addHandler(logging.NullHandler())
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    began = time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        results = sweep(Path(base).resolve(), every)
    for name, counts in results.items():
        print(json.dumps({"case": name, **counts}))
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
