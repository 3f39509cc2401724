"""Writing a result, with its n-th system call failing or killing the process, for every n.

Afterwards there is the earlier result (or none) or the new one, byte for byte, and files of others
are unchanged; the next write succeeds and leaves nothing behind.

    python -m tests.faults.export_sweep [every n-th point]
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hetero_framework.models.files.export import OutputDirectory, write_checkpoint
from tests.faults.syscall_sweep import MODES, WRITTEN, WRITTEN_AGAIN, Counts, disturbed, points, run

Tree = dict[str, bytes]
CONFIG = LlamaConfig(
    **{"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8},
    **{"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
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


def sweep(base: Path, every: int) -> Counts:
    """Every scene, every mode, every n-th point: how often the old and the new result is found."""
    writer, results = Writer(), {}
    for scene, prepare in SCENES.items():
        start, done, root = base / "start", base / "done", base / "case"
        prepare(start, writer)
        old = tree(start / "model")
        shutil.copytree(start, done)
        writer.write(done, 2.0)
        new = tree(done / "model")
        for mode in MODES:
            case = partial(_case, root, writer, (old, new), mode)
            results[f"{scene}: {mode}"] = points(start, root, every, case)
        shutil.rmtree(start)
        shutil.rmtree(done)
    return results


def _case(
    root: Path, writer: Writer, trees: tuple[Tree | None, Tree | None], mode: str, number: int
) -> str | None:
    """Which result is there after that call went wrong; None where there was none."""
    reached, result = disturbed(root, lambda: writer.write(root, 2.0), mode, number)
    if not reached:
        return None
    found, (old, new) = tree(root / "model"), trees
    assert found in (old, new), "neither the old nor the new result"
    outcome = "new" if found == new else "old"
    assert outcome == "new" or result not in (WRITTEN, WRITTEN_AGAIN), "said to be written"
    writer.write(root, 2.0)  # the next run
    assert tree(root / "model") == new
    assert [path.name for path in root.iterdir()] == ["model"]
    return outcome


if __name__ == "__main__":
    run(sweep)
