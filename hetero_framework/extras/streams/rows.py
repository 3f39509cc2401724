"""A stream as training data: examples by their numbers, as far as a run has come.

A separate process (`child`) makes examples, a bounded number ahead of the step. An example
is a function of its number: an earlier example is kept, or read again from the nearest known place.
So steps that are repeated, runs that go back and islands, which deal the numbers, need nothing
more. A checkpoint has the known places.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import psutil

from hetero_framework import control, registry
from hetero_framework.cluster import oom_killer
from hetero_framework.cluster.child import describe_end, end_processes, environment, start
from hetero_framework.config import Config
from hetero_framework.data.batches import SampleOrder
from hetero_framework.data.examples import IGNORE_INDEX, StreamedRows
from hetero_framework.data.sources import find_sources
from hetero_framework.data.token_cache import tokenizer_text
from hetero_framework.errors import DataError
from hetero_framework.extras.streams.child import HEADER, Job
from hetero_framework.extras.streams.reading import BLOCK_CHARACTERS, BLOCK_ROWS, compare, contents
from hetero_framework.units import plural, size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_PROGRAM = (sys.executable, "-m", "hetero_framework.extras.streams.child")
_AHEAD = 32  # frames that wait for a step, of up to 64 examples or about 2**18 tokens
_PATIENCE_S = 150.0
_END_S = 5.0
_KEPT_TOKENS = 2**22
_PLACES = 64
_LOST = {"cut", "long", "dropped"}


class EndlessOrder(SampleOrder):
    """Samples one after another in whole steps. The length of a stream is not known, so that all
    steps of a run count as one epoch, as in the Trainer."""

    @property
    def total_steps(self) -> int:
        return self.training.max_steps

    @property
    def batches_per_epoch(self) -> int:
        return self.total_steps * self.training.gradient_accumulation_steps

    def step_indices(self, step: int) -> list[np.ndarray]:
        """Numbers of samples. In the step after the last all are -1: samples of the most tokens."""
        if not 0 <= step <= self.total_steps:
            raise IndexError(f"step {step} is not one of {self.total_steps}")
        count = self.samples_per_step
        numbers = np.arange(step * count, (step + 1) * count)
        numbers[numbers >= self.total_steps * count] = -1
        return np.split(numbers, self.training.gradient_accumulation_steps)

    def largest(
        self, tokens: np.ndarray, first_step: int, *, packed: bool = False, multiple: int = 1
    ) -> tuple[int, int] | None:
        return (self.total_steps, 0) if first_step < self.total_steps else None


class Frame(NamedTuple):
    """Examples from number `first` on. `ends` are the bounds of their tokens."""

    first: int
    ends: np.ndarray
    told: dict[str, Any]


class StreamRows(StreamedRows):
    """The examples of a run, by number."""

    def __init__(self, job: Job, count: int, longest: int) -> None:
        self.longest, self.fingerprint = longest, ""
        self.lengths = np.broadcast_to(np.int64(longest), count)
        self.tokens = count * longest  # at most
        self._job = job
        self._places: list[tuple[int, Any]] = [(0, None)]
        """The known places in order, from the first example on: an example's number, and the
        stream's state there. Each change makes a new list."""
        self._child: _ReadingProcess | None = None
        self._frames: deque[Frame] = deque()
        self._next = 0
        self._counts: Mapping[str, int] = {}
        self.waited_s = 0.0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels. A number below 0 stands for an example as long as any may be."""
        if index < 0:
            return np.zeros(self.longest, np.int64), np.zeros(self.longest, np.int64)
        frame = self.frame(index)
        span = slice(*frame.ends[index - frame.first : index - frame.first + 2])
        ids = np.frombuffer(frame.told["ids"], np.int32)[span].astype(np.int64)
        return ids, np.where(np.frombuffer(frame.told["trained"], "?")[span], ids, IGNORE_INDEX)

    def told(self, index: int, name: str) -> Any:
        """A fact about an example."""
        frame = self.frame(index)
        return frame.told[name][index - frame.first]

    def where(self, index: int) -> str:
        """The file and row of an example."""
        return str(self.told(index, "where"))

    def parts(self, index: int) -> list[tuple[int, int]]:
        """An example, and the number of its tokens."""
        return [(index, len(self[index][0]))]

    def begin(self) -> list[str]:
        """Make the first examples, and return lines for the user."""
        lines: list[str] = []
        try:
            self.frame(0, lines)
        except DataError:
            self.close()
            raise
        shards = self._job["shards"] or {}
        whole = f"{plural(len(shards), 'file')} ({size(sum(n for n, *_ in shards.values()))})"
        what = f"a stream{f' of {whole}' if shards else ''}, tokenised while the run goes on"
        return [f"train: {what}", *lines]

    def state(self) -> dict[str, Any]:
        return {"shards": self._job["shards"], "places": self._places}

    def restore(self, state: Any) -> None:
        compare(state["shards"], self._job["shards"] or {})
        self._places = [(int(first), place) for first, place in state["places"]]

    def close(self) -> None:
        if self._child is None:
            return
        if self._counts.keys() & _LOST or self.waited_s >= 1:
            counts = ", ".join(f"{count:,} {name}" for name, count in self._counts.items())
            _log.info("train: rows: %s; steps waited %.1f s for them", counts, self.waited_s)
        self._child.close()
        self._child = None

    def frame(self, index: int, lines: list[str] | None = None) -> Frame:
        """The frame with an example. The process begins anew where it has gone past that example,
        or where a place closer before it is known."""
        first, state = self._places[bisect_right(self._places, index, key=lambda p: p[0]) - 1]
        kept_from = self._frames[0].first if self._frames else self._next
        if self._child is None or index < kept_from or first > self._next:
            self.close()
            self._frames.clear()
            self._child, self._next = _ReadingProcess({**self._job, "state": state}), first
            self._job["shards"] = self._child.next()["shards"]
        while self._next <= index:
            began = time.monotonic()
            found = self._child.next()
            self._take(found)
            if lines is not None:
                lines += found["lines"]
                continue
            self.waited_s += time.monotonic() - began
            for line in found["lines"]:
                text = line.removeprefix("warning: ")
                _log.log(logging.INFO if text == line else logging.WARNING, "%s", text)
        return [frame for frame in self._frames if frame.first <= index][-1]

    def _take(self, found: dict[str, Any]) -> None:
        self._counts = found["counts"]
        if self._next > self._places[-1][0]:
            places = [*self._places, (self._next, json.loads(found["state"]))]
            half = _PLACES // 2  # far back, places lie less close together
            self._places = places if len(places) < _PLACES else places[:half:2] + places[half:]
        ends = np.concatenate([[0], np.frombuffer(found["lengths"], np.int64).cumsum()])
        if len(ends) > 1:
            self._frames.append(Frame(self._next, ends, found))
            self._next += len(ends) - 1
        while len(self._frames) > 1 and sum(f.ends[-1] for f in self._frames) > _KEPT_TOKENS:
            self._frames.popleft()


@dataclass(frozen=True)
class _Sources:
    """The number of the source of each example."""

    rows: StreamRows

    def __getitem__(self, numbers: Sequence[int]) -> np.ndarray:
        found = [self.rows.told(k, "sources") if k >= 0 else 0 for k in numbers]
        return np.array(found, np.uint8)


class _ReadingProcess:
    """The process that reads, and the thread that takes its frames."""

    def __init__(self, job: Job) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._kills = oom_killer.out_of_memory_kills()
        self._process = start(_PROGRAM, environment(), subprocess.PIPE, self._errors.fileno())
        assert self._process.stdin is not None
        self._frames = SimpleQueue[dict[str, Any] | None]()
        self._room = Semaphore(_AHEAD)
        taking = self._process.stdout, self._frames, self._room
        Thread(target=_receive, args=taking, name="stream", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._process, self._room, self._errors)
        with suppress(OSError):  # where it has ended, there is no frame
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def next(self) -> dict[str, Any]:
        """The process's next frame. Raises DataError for its errors, its end and its silence."""
        worked_s, frame = 0.0, None
        while True:
            with suppress(Empty):
                frame = self._frames.get(timeout=_PATIENCE_S)
                break
            before, worked_s = worked_s, sum(psutil.Process(self._process.pid).cpu_times()[:2])
            if worked_s <= before:  # while it works, it may look for its place in a large shard
                text = f"data.train: the stream gave nothing for {2 * _PATIENCE_S:g} s"
                raise DataError(text, hint="look at the disk or the network that it is on")
        self._room.release()
        if frame is None:
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            end = describe_end(self._process.pid, self._process.wait(_END_S), self._kills)
            text = f"data.train: the process that reads the stream ended ({end})"
            raise DataError(f"{text}: {said}" if said else text)
        if "error" in frame:
            raise DataError(frame["error"], hint=frame["hint"])
        return frame


def _receive(pipe: IO[bytes], frames: SimpleQueue[Any], room: Semaphore) -> None:
    try:
        with suppress(OSError, ValueError), pipe:
            while room.acquire() and len(head := pipe.read(HEADER.size)) == HEADER.size:
                frames.put(msgpack.unpackb(pipe.read(*HEADER.unpack(head))))
    finally:  # whatever has ended it, a step that waits hears of it
        frames.put(None)


def _close(process: subprocess.Popen[bytes], room: Semaphore, errors: IO[bytes]) -> None:
    end_processes([process], _END_S)
    room.release(2**20)  # the thread meets the end of the pipe
    errors.close()


def stream(
    config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, report: list[str]
) -> tuple[StreamRows, EndlessOrder, Any]:
    """The stream of data.train, whose process has begun to read, its order, and the mixture where
    it has several sources. Raises DataError."""
    data, training = config.data, config.training
    assert data is not None
    assert data.max_length is not None
    imports = [str(path) for path in control.imported_files()]
    job = Job(
        config=config.to_dict(),
        base_dir=str(config.base_dir.absolute()),
        imports=imports,
        vocab_size=vocab_size,
        state=None,
        shards=None,
    )
    count = training.max_steps * training.per_device_train_batch_size
    count *= training.gradient_accumulation_steps
    rows = StreamRows(job, count, data.max_length)
    report += rows.begin()
    # All that decides the examples; files count by their content, wherever they are.
    known = tokenizer_text(tokenizer) or [sorted(tokenizer.get_vocab()), tokenizer.chat_template]
    settings = {name: value for name, value in data.of_stream.items() if name != "train"}
    sources = [source.model_dump(mode="json", exclude={"path"}) for source in data.sources]
    paths = [find_sources(part.paths, config.base_dir) for part in data.parts]
    hub = [[source.name for source in found if source.path is None] for found in paths]
    about = [settings, sources, hub, training.train_sampling_strategy, BLOCK_ROWS, BLOCK_CHARACTERS]
    text = json.dumps(["stream 2", known, about, contents(job["shards"] or {})])
    rows.fingerprint = hashlib.sha256(text.encode()).hexdigest()
    mixture = None
    if len(data.sources) > 1:
        make = registry.needed("mixtures", "mixture", "data.train with several sources")
        names = tuple(source.label for source in data.sources)
        mixture = make(names, rows, _Sources(rows), None, None, [])
    return rows, EndlessOrder(count, training), mixture
