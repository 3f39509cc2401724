"""Uploads of a run to the hub: its result at the end, and its newest checkpoint while it trains.

Uploads go one after another, each in a process of its own (hub_upload.py). A newer checkpoint
replaces one that waits. A failed upload is logged once and does not change the run.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_framework.cluster.child import describe_exit, end_processes, environment, start
from hetero_framework.core import timeouts
from hetero_framework.extras.reporting import hub_upload
from hetero_framework.extras.reporting.hub_upload import PUBLIC, repository
from hetero_framework.extras.reporting.settings import ReportSettings
from hetero_framework.log import event
from hetero_framework.trainer.observers import Due, Observer, RunStart, Watched
from hetero_framework.trainer.outputs import command, typed
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Upload:
    """One upload of a checkpoint or the result; without a folder it only makes the repository."""

    what: str
    folder: Path | None = None
    path: str = ""  # in the repository
    step: int | None = None  # of a checkpoint


class HubUploads(Observer):
    """Uploads what training.hub_strategy says. No upload outlives the run."""

    def __init__(self, run: Watched) -> None:
        config = run.placed.prepared.config
        self._config, self._store, self._should_stop = config, run.store, run.should_stop
        self._process: subprocess.Popen[bytes] | None = None
        self._upload = _Upload("the repository")  # the upload of `_process`
        self._until = 0.0
        self._settings = ReportSettings.of(config.training)
        # Of several islands, only one uploads.
        self._next = [self._upload] * (config.setting("island") is None)
        self._is_told = False  # a failure was told, and no upload succeeded since
        self._is_saver = True
        self._result = _Upload(f"the {config.result_dir.name}", config.result_dir)

    def close(self, failed: bool) -> None:
        if self._process is not None:
            self._is_told |= self._upload.folder is None
            self._take("the run has ended")

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        self._look()

    def step_end(self, state: TrainState, line: Mapping[str, object], due: Due) -> None:
        self._look()

    def saved(self, state: TrainState, due: Due) -> None:
        strategy, name = self._settings.hub_strategy, f"step_{state.step}"
        if strategy != "end":
            path = "last-checkpoint" if strategy == "checkpoint" else name
            newest = _Upload(f"checkpoint {state.step}", self._store.root / name, path, state.step)
            self._next = [*(other for other in self._next if other.step is None), newest]
        self._look()

    def trained(self, state: TrainState, due: Due) -> None:
        self._is_saver = due.is_saver

    def finished(self, state: TrainState, files: Mapping[str, str | Path]) -> None:
        if self._is_saver:
            self._next.insert(0, self._result)
            _log.info("uploading to the hub; Ctrl-C ends the wait")
        while not self._should_stop():
            self._look()
            if self._process is None:
                return
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeouts.ANSWER_TICK_S)
        if self._process is not None:
            self._take("the run was told to stop")
        for upload in self._next:
            self._tell(upload, "the run was told to stop")

    def _look(self) -> None:
        """Finish the upload under way if its process has ended or takes too long. Then begin the
        next upload."""
        if self._process is not None and self._process.poll() is not None:
            self._take()
        elif self._process is not None and time.monotonic() >= self._until:
            self._take("it took too long")
        while self._process is None and self._next:
            self._begin(self._next.pop(0))

    def _begin(self, upload: _Upload) -> None:
        settings = self._settings
        job = {
            "repository": repository(self._config),
            "private": settings.hub_private_repo,
            "revision": settings.hub_revision,
            "folder": upload.folder and str(upload.folder),
            "path": upload.path,
            "message": f"Upload {upload.what}",
            "must_be_private": settings.hub_strategy != "end" and upload != self._result,
        }
        program = [sys.executable, "-m", hub_upload.__name__, json.dumps(job)]
        try:
            files = upload.folder.iterdir() if upload.folder is not None else ()
            nbytes = sum(file.stat().st_size for file in files)
            self._process = start(program, environment(), subprocess.PIPE, subprocess.DEVNULL)
        except OSError as error:
            if upload.folder is None or upload.folder.is_dir():  # else the checkpoint was deleted
                self._tell(upload, str(error))
            return
        with suppress(AttributeError, OSError):  # Windows has no such priorities
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 15)
        self._until = time.monotonic() + timeouts.UPLOAD_S + nbytes / timeouts.UPLOAD_BYTES_PER_S
        self._upload = upload
        self._store.hold(upload.step)

    def _take(self, why: str | None = None) -> None:
        """Report the upload under way, which has ended; with `why`, a reason, end it first."""
        process, self._process, upload = self._process, None, self._upload
        assert process is not None
        assert process.stdout is not None
        end_processes([process], 0.0)
        with process.stdout:
            line = process.stdout.read().decode("utf-8", "replace").strip() if not why else ""
        self._store.hold(None)
        if why or process.returncode != 0:
            known = why or line or describe_exit(process.returncode)
            self._tell(upload, known, by_hand=bool(why) or process.returncode != PUBLIC)
        else:
            self._is_told &= upload == self._result
            done = event("uploaded", upload.what, place=line)
            if upload.folder is not None:
                _log.info("uploaded %s to %s", upload.what, line, extra=done)

    def _tell(self, upload: _Upload, why: str, *, by_hand: bool = True) -> None:
        """Warn of an upload that is missing: of the result always, of others once."""
        if self._is_told and upload != self._result:
            return
        self._is_told, settings = True, self._settings
        todo = ""
        if upload.folder is not None and by_hand:
            words = ["hf", "upload", repository(self._config), typed(upload.folder), upload.path]
            words += ["--private"] if settings.hub_private_repo else []
            words += ["--revision", settings.hub_revision] if settings.hub_revision else []
            todo = f". To upload it: {command(*filter(None, words))}"
        failed = event("upload failed", "the run goes on", reason=why)
        _log.warning("%s is not on the hub: %s%s", upload.what, why, todo, extra=failed)
