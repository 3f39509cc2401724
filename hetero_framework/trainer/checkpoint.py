"""Checkpoints on disk: complete or not there at all.

    <root>/step_40/
        stage-0.0.safetensors      one file per stage and part; only the owner can read any
        stage-1.0.safetensors
        manifest.json              written last: what belongs here, with the hash of each file

Tensors are keyed by parameter name ("weights/<param>", "optimizer/<state>/<param>"), never by
rank, so a checkpoint can be read under any plan. A checkpoint is written in `step_40.tmp` and
renamed when every byte is on the disk: a process killed at any moment leaves the old state or the
new one, never a mixture. Two further names exist for moments only: `step_40.old` is a complete
checkpoint that is being replaced, and `step_40.trash` is a checkpoint that is being deleted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetero_framework._version import __version__
from hetero_framework.config import Config
from hetero_framework.core import failpoints
from hetero_framework.core.files import (
    put_back,
    rename,
    replace_directory,
    sync_directory,
    sync_file,
)
from hetero_framework.errors import CheckpointError, ResourceError, in_words, of_system
from hetero_framework.file_trust import untrusted_reason
from hetero_framework.units import size

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})(?:\.(tmp|old|trash))?")
_ALMOST = re.compile(r"(?i)(step|checkpoint)[-_ ]?[-+0-9].*")
_FILE_NAME = re.compile(r"stage-[0-9]+\.[0-9]+\.safetensors")
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

_log = logging.getLogger(__name__)


class RefusedCheckpoint(CheckpointError):
    """A checkpoint that may be complete is refused. No other step is taken instead, since a person
    has to decide."""


class CheckpointStore:
    """The checkpoints of one run. Changes that nobody asked for are logged.

    `save_total_limit` >= 1 is how many complete checkpoints are kept (None: all). Without `lasting`
    writing does not wait for the disk: checkpoints outlive the process, but not a power cut.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        save_total_limit: int | None = None,
        *,
        lasting: bool = True,
    ) -> None:
        self.root = Path(root)
        self.save_total_limit = save_total_limit
        self.lasting = lasting
        self.best_steps: list[int] = []
        """Steps that were the best when they were evaluated, also those without a checkpoint."""
        self.saved: set[int] = set()
        """Steps that this run has saved; a rotation, or a person, may have deleted some."""
        self.damaged: set[int] = set()
        """Steps whose checkpoints were found to be damaged."""
        self._held: int | None = None
        self._waiting: set[int] = set()  # steps to delete when they are no longer held

    @property
    def best_step(self) -> int | None:
        """The newest best step that was saved. No rotation deletes it, but a person may have."""
        return next((step for step in reversed(self.best_steps) if step in self.saved), None)

    def has(self, step: int | None) -> bool:
        """Whether the checkpoint of a step has a manifest, and was not found to be damaged."""
        with suppress(CheckpointError):  # what cannot be looked at is not complete
            return step in self.complete_steps() and step not in self.damaged
        return False

    def hold(self, step: int | None) -> None:
        """Keep checkpoint `step` until the next call, since it is being read."""
        self._held, waiting, self._waiting = step, self._waiting, set()
        for other in sorted(waiting):
            self.delete(other)

    def remove(self) -> None:
        """Delete all checkpoints, and the directory."""
        shutil.rmtree(self.root, ignore_errors=True)

    @contextmanager
    def begin(self, step: int) -> Iterator[CheckpointWriter]:
        """A writer of a new checkpoint, which leaves no trace unless its `commit` is called.

        This and all methods of the writer raise ResourceError if something cannot be written.
        """
        directory = self.root / f"step_{step}.tmp"
        try:
            self.root.mkdir(0o700, parents=True, exist_ok=True)
            self.clean()
            directory.mkdir(0o700)
        except (OSError, CheckpointError) as error:
            raise _cannot_write(error, directory) from error
        try:
            yield CheckpointWriter(self, step, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def clean(self) -> None:
        """Remove what an interrupted write left behind."""
        for path in self.paths():
            step, kind = _parsed(path.name)
            if kind is None:
                continue
            if path.is_symlink() or not path.is_dir():
                raise _in_the_way(path)
            if kind == "old" and put_back(self.root / f"step_{step}", path):
                _log.warning("put checkpoint %d back: its replacement was interrupted", step)
            else:
                shutil.rmtree(path)
                _log.warning("removed %s, left by an interrupted write", path.name)

    def paths(self) -> list[Path]:
        """Checkpoints, complete or not, and what interrupted writes left."""
        return [path for path in self._entries() if _NAME.fullmatch(path.name)]

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            is_file = isinstance(error, NotADirectoryError)
            raise CheckpointError(
                f"cannot read the checkpoint directory {self.root}: "
                f"{'it is a file' if is_file else error.strerror}",
                hint="move it away or set another checkpoint_dir" if is_file else None,
            ) from error

    def complete_steps(self, *, links: bool = False) -> list[int]:
        """Steps that have a manifest, ascending. With `links`, steps that are links are listed too,
        although they cannot be opened. Only names are looked at; `resolve` looks inside."""
        steps = set()
        for path in self.paths():
            step, kind = _parsed(path.name)
            with suppress(OSError):  # what cannot be looked at is not complete
                if kind in (None, "old") and (
                    links if path.is_symlink() else (path / MANIFEST).is_file()
                ):
                    steps.add(step)
        return sorted(steps)

    def resolve(self, which: int | str) -> CheckpointReader:
        """The checkpoint that `which` ("latest" or a step) means, after hashing all of it.

        "latest" passes over damaged checkpoints with a warning; a step never falls back. Raises
        CheckpointError, which lists the complete steps, and RefusedCheckpoint for a checkpoint
        that others may have made or that this version cannot read.
        """
        if which == "latest":
            return self._latest()
        if isinstance(which, bool) or not re.fullmatch(r"[0-9]{1,18}", str(which)):
            raise CheckpointError(f"checkpoint {which!r}: give a step number or 'latest'")
        try:
            return self.open(int(which))
        except CheckpointError as error:
            others = ", ".join(str(n) for n in self.complete_steps() if n != int(which))
            complete = f"complete in {self.root}: {others}"
            hints = [error.hint, complete if others else f"there is no complete one in {self.root}"]
            raise type(error)(error.message, hint="; ".join(filter(None, hints))) from error

    def _latest(self) -> CheckpointReader:
        problems = []
        for path in self._entries():
            if _ALMOST.fullmatch(path.name) and not _NAME.fullmatch(path.name):
                text = "ignored %s in %s: a checkpoint is called step_<number>"
                _log.warning(text, path.name, self.root)
        # Steps without a manifest too, since each step that is passed over is reported.
        parsed = (_parsed(path.name) for path in self.paths())
        for step in sorted({step for step, kind in parsed if kind in (None, "old")}, reverse=True):
            try:
                reader = self.open(step)
            except RefusedCheckpoint:
                raise
            except CheckpointError as error:
                problems.append(error.message)
                continue
            for problem in problems:
                _log.warning("%s; using checkpoint %d", problem, step)
            return reader
        if problems:
            raise CheckpointError("; ".join(problems), hint=f"no valid checkpoint in {self.root}")
        hint = "start without a step to resume from, or point checkpoint_dir at the old run"
        raise CheckpointError(f"there is no checkpoint in {self.root}", hint=hint)

    def open(self, step: int) -> CheckpointReader:
        """Open checkpoint `step` after hashing all of it. Raises CheckpointError when it is absent,
        incomplete or damaged."""
        directory = self.root / f"step_{step}"
        try:
            if not directory.exists() and (replaced := self.root / f"step_{step}.old").is_dir():
                directory = replaced
            is_directory = directory.is_dir()
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
        if not is_directory:
            raise CheckpointError(f"there is no checkpoint {step} in {self.root}")
        return CheckpointReader(step, directory)

    def rotate(self, newest: int) -> None:
        """Delete the lowest steps beyond `save_total_limit`, but never `newest` nor the best."""
        if self.save_total_limit is None:
            return
        try:
            others = [step for step in self.complete_steps() if step != newest]
        except CheckpointError as error:  # only the new checkpoint matters, and it exists
            _log.warning("%s", error.message)
            return
        limit = self.save_total_limit
        if (best := self.best_step) in others:
            others.remove(best)
            limit = max(1, limit - 1)
        for step in others[: max(0, len(others) + 1 - limit)]:
            self.delete(step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint, or log why it cannot. A held checkpoint is deleted later."""
        if step == self._held:
            self._waiting.add(step)
            return
        directory, trash = self.root / f"step_{step}", self.root / f"step_{step}.trash"
        try:
            rename(directory, trash)  # a half-deleted checkpoint must not look complete
            shutil.rmtree(trash)
        except OSError as error:
            # Disk is lost, not state: a file held open elsewhere (Windows) must not end a run.
            _log.warning("could not delete the old checkpoint %s: %s", directory, error)


def durable_store(config: Config) -> CheckpointStore:
    """The store of a run's durable step (trainer/durable.py), for the process that continues it."""
    return CheckpointStore(config.output_dir / ".durable", 1, lasting=False)


class CheckpointWriter:
    """One checkpoint being written."""

    def __init__(self, store: CheckpointStore, step: int, directory: Path) -> None:
        self._store = store
        self._step = step
        self._directory = directory
        self._files: list[dict[str, Any]] = []
        self._names: set[str] = set()

    def add(self, stage_index: int, part: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors as `stage-<stage_index>.<part>.safetensors`, forced to the disk if the
        store is `lasting`. Raises CheckpointError when a tensor's name was added before."""
        if twice := sorted(self._names.intersection(tensors)):
            raise CheckpointError(f"checkpoint {self._step} got {twice[0]!r} from two stages")
        path = self._directory / f"stage-{stage_index}.{part}.safetensors"
        with self._writing(path, sum(tensor.nbytes for tensor in tensors.values())):
            save_file(_separate(tensors), path)
            if self._store.lasting:
                sync_file(path)
            self._files.append(
                {
                    "name": path.name,
                    "stage": stage_index,
                    "part": part,
                    "bytes": path.stat().st_size,
                    "sha256": _sha256(path),
                    "tensors": sorted(tensors),
                }
            )
        self._names.update(tensors)

    def commit(self, manifest: dict[str, Any]) -> Path:
        """Write the manifest, rename the checkpoint to its name, delete the oldest checkpoints.

        `manifest` is JSON data about the run; the keys format_version, step, files and digest are
        added here. Returns the directory.
        """
        failpoints.hit("checkpoint")
        content = {"format_version": FORMAT_VERSION, "step": self._step, **manifest}
        content["files"] = self._files
        content["digest"] = _digest(content)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        path, final = self._directory / MANIFEST, self._store.root / f"step_{self._step}"
        with self._writing(path, len(text)):
            path.touch(0o600)
            path.write_text(text, encoding="utf-8", newline="\n")
            if self._store.lasting:
                sync_file(path)
                sync_directory(self._directory)
            if final.is_symlink() or (final.exists() and not final.is_dir()):
                raise _in_the_way(final)
            # The moment of truth: one rename. A checkpoint of the same step steps aside first.
            old = final.with_name(f"{final.name}.old")
            replace_directory(self._directory, final, old, lasting=self._store.lasting)
        self._store.saved.add(self._step)
        self._store.rotate(self._step)
        return final

    @contextmanager
    def _writing(self, path: Path, nbytes: int) -> Iterator[None]:
        """Raise ResourceError where the disk refuses a file of `nbytes`."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if getattr(of_system(error), "errno", None) not in _NO_SPACE:
                raise _cannot_write(error, path) from error
            shutil.rmtree(self._directory, ignore_errors=True)  # its space counts as free
            try:
                free = f"{size(shutil.disk_usage(self._store.root).free)} are free"
            except OSError as problem:
                free = f"the free space is not known ({problem.strerror})"
            needed = size(sum(entry["bytes"] for entry in self._files) + nbytes)
            raise ResourceError(
                f"no space for checkpoint {self._step} in {self._store.root}: it needs at least "
                f"{needed}, {free}",
                hint="free some space, lower save_total_limit or set another checkpoint_dir. "
                "Earlier checkpoints are intact",
            ) from error


class CheckpointReader:
    """One complete checkpoint. `manifest` is what the writer was given, and the list of files."""

    def __init__(self, step: int, directory: Path) -> None:
        self.step = step
        self.directory = directory
        self._refuse_planted(directory)
        self.manifest = self._read_manifest()
        self._tensor_names: set[str] = set()
        try:
            for entry in self.manifest["files"]:
                self._check_file(entry)
                self._tensor_names.update(entry["tensors"])
        except (KeyError, TypeError) as error:
            raise self._damaged(f"the list of files in {MANIFEST} is not one") from error

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._tensor_names)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the named tensors as (name, tensor), in the order of the files. Raises
        CheckpointError at once for names that are absent."""
        wanted = set(names)
        if missing := sorted(wanted - self._tensor_names):
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(
                f"checkpoint {self.step} lacks {len(missing)} of {len(wanted)} tensors: {shown}",
                hint="it was written by a run with another model, adapter or optimizer",
            )
        return self._tensors(wanted)

    def _tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self.manifest["files"]:
            chosen = [name for name in entry["tensors"] if name in wanted]
            if not chosen:
                continue
            path = self.directory / entry["name"]
            with self._reading(path), safe_open(path, framework="pt") as file:
                # Copies, not views of the mapped file: rotation may delete the file.
                yield from ((name, file.get_tensor(name).clone()) for name in chosen)

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Raise CheckpointError where the block cannot read a file or directory."""
        try:
            yield
        except FileNotFoundError as error:
            if path.name == MANIFEST:
                incomplete = f"checkpoint {self.step} is incomplete: it has no {MANIFEST}"
                raise CheckpointError(incomplete) from error
            raise self._damaged(f"{path.name} is missing") from error
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            # RuntimeError: torch maps the file, and JSON may be too deep.
            raise self._damaged(f"{path.name} cannot be read ({in_words(error)})") from error

    def _refuse_planted(self, path: Path) -> None:
        with self._reading(path):
            wrong = untrusted_reason(path, by_group=True)
        if wrong is not None:
            raise RefusedCheckpoint(
                f"checkpoint {self.step} is not read, others may have made it: {path} "
                f"{wrong.problem}",
                hint=wrong.mend,
            )

    def _read_manifest(self) -> dict[str, Any]:
        path = self.directory / MANIFEST
        self._refuse_planted(path)
        with self._reading(path):
            content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise self._damaged(f"{MANIFEST} is not an object")
        version = content.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            versions = content.get("versions")
            newer = versions.get("hetero_framework") if isinstance(versions, dict) else None
            raise RefusedCheckpoint(
                f"checkpoint {self.step} was made by hetero_framework {newer or 'of later'}, in "
                f"format {version}; this is {__version__}, which reads up to format "
                f"{FORMAT_VERSION}",
                hint="upgrade hetero-framework on this machine, or name an earlier step",
            )
        if version != FORMAT_VERSION:
            raise self._damaged(f"{MANIFEST} has format_version {version!r}")
        if content.pop("digest", None) != _digest(content):
            raise self._damaged(f"{MANIFEST} was changed after it was written")
        if (step := content.get("step")) != self.step:
            problem = f"{self.directory} holds the checkpoint of step {step}"
            raise CheckpointError(problem, hint=f"rename it to step_{step}")
        return content

    def _check_file(self, entry: dict[str, Any]) -> None:
        name, path = entry["name"], self.directory / entry["name"]
        if not _FILE_NAME.fullmatch(name):
            raise self._damaged(f"{name!r} is not a file of a checkpoint")
        self._refuse_planted(path)
        with self._reading(path):
            nbytes = path.stat().st_size
        if nbytes != entry["bytes"]:
            raise self._damaged(f"{name} has {nbytes} bytes instead of {entry['bytes']}")
        with self._reading(path):
            digest = _sha256(path)
        if digest != entry["sha256"]:
            raise self._damaged(f"{name} does not have the sha256 that its manifest says")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.step} is damaged: {why}")


def _parsed(name: str) -> tuple[int, str | None]:
    """The step in a name like "step_40" or "step_40.old", and its ending ("old") or None."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), match[2]


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, none sharing memory with another (tied weights are saved twice)."""
    separate: dict[str, torch.Tensor] = {}
    starts: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        separate[name] = plain.clone() if plain.data_ptr() in starts else plain
        starts.add(plain.data_ptr())
    return separate


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: dict[str, Any]) -> str:
    """The hash of a manifest, so that an edit by hand is noticed."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _in_the_way(path: Path) -> ResourceError:
    return ResourceError(f"{path} is in the way: it is not a directory", hint="move it away")


def _cannot_write(error: Exception, path: Path) -> ResourceError:
    reason = in_words(error)
    mend = "make the directory writable"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        reason, mend = "a file is in the way", "move it away"
    problem = f"cannot write a checkpoint to {path}: {reason}"
    return ResourceError(problem, hint=f"{mend} or set another checkpoint_dir")
