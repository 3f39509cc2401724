"""The plan: the layers of each stage, and the process that owns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import StrictInt

from hetero_framework.config.problems import Problem, shown
from hetero_framework.config.section import FREE, Layer, Section, WorkerId, with_unit
from hetero_framework.errors import PlanError


class PlanEntry(Section):
    """One stage: the layers [start, end) on one machine."""

    effect = FREE

    id: WorkerId
    """Owner of the layers: "local" (the coordinator) or the id of a worker. The first entry is
    "local"; an id may appear several times. Elsewhere: name, worker_id, owner, worker."""
    start: Layer
    """First layer of the stage, counted from 0."""
    end: Layer
    """Layer after the last one of the stage. The first entry may hold the embedding only (start =
    end = 0), the last one the head only (start = end = number of layers)."""
    is_last: bool | None = None
    """Optional mark of the stage that holds the head; only the last entry can have true."""
    links: Literal["auto", "relay", "direct"] | None = None
    """How tensors cross the boundary in front of this stage. null: as the run's `links` says."""
    gradient_checkpointing: bool | None = None
    """Replaces training.gradient_checkpointing for this stage. null: as training says."""
    offload: Annotated[StrictInt, with_unit("layers", ge=0)] | Literal["auto"] = 0
    """Layers of this stage that stay in host memory and visit the device in the order of their use.
    Layers that are trained have their gradients and the stage's optimizer states there, too. The
    device has room for two layers at any time, so 4 is the least that saves memory.
    "auto": as few as it takes to fit the device's free memory."""
    offload_optimizer: bool | None = None
    """Replaces training.offload_optimizer for this stage. null: as training says."""


def layers_text(start: int, end: int) -> str:
    """`[start, end)` in words that include both ends, as in "layers 0-7"."""
    if end <= start:
        return "no layers"
    return f"layer {start}" if end == start + 1 else f"layers {start}-{end - 1}"


def process_name(owner: int | str) -> str:
    """ "local" and the ids of workers as people read them: "coordinator", "worker 2"."""
    return "coordinator" if owner == "local" else f"worker {owner}"


@dataclass(frozen=True)
class StageSpec:
    """One stage of the plan: layers [start, end) at `owner` ("local" or a worker id)."""

    index: int
    owner: int | str
    start: int
    end: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> str:
        """The layers in words: "layers 0-7"."""
        return layers_text(self.start, self.end)

    @property
    def contents(self) -> str:
        """All that the stage holds: "embedding + layers 0-7"."""
        parts = ["embedding"] * self.is_first + [self.layers] * (self.end > self.start)
        return " + ".join(parts + ["head"] * self.is_last) or self.layers

    @property
    def process(self) -> str:
        """The process that runs it: "coordinator" or "worker 2"."""
        return process_name(self.owner)


@dataclass(frozen=True)
class Plan:
    """The stages and their owners: valid, without gap or overlap, the coordinator's first."""

    entries: tuple[PlanEntry, ...]

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages, in model order."""
        last = len(self.entries) - 1
        return tuple(
            StageSpec(i, entry.id, entry.start, entry.end, i == 0, i == last)
            for i, entry in enumerate(self.entries)
        )

    @property
    def num_layers(self) -> int:
        """Layers that the entries hold together."""
        return self.entries[-1].end

    @property
    def owners(self) -> tuple[int | str, ...]:
        """The processes with a stage, in the order of first appearance; "local" comes first."""
        return tuple(dict.fromkeys(entry.id for entry in self.entries))

    def of(self, owner: int | str) -> tuple[StageSpec, ...]:
        """The stages of one owner."""
        return tuple(stage for stage in self.stages if stage.owner == owner)

    def covers(self, num_layers: int, first: int = 0) -> None:
        """Raise PlanError unless the plan holds exactly the model's `num_layers` layers, and its
        first stage at least the `first` of them."""
        if self.num_layers == num_layers:
            if (end := self.entries[0].end) < first:
                raise PlanError(
                    f"shard_plan[0].end is {end}: the model also adds pictures to"
                    f" {layers_text(0, first)}, and only the first stage has them",
                    hint=f"let the first entry end at {first} or later",
                )
            return
        ends, covered = [entry.end for entry in self.entries], self.num_layers
        missing = f"; nobody holds {layers_text(covered, num_layers)}"
        wrong = next((i for i, end in enumerate(ends) if end > num_layers), len(ends) - 1)
        raise PlanError(
            f"shard_plan[{wrong}].end is {ends[wrong]}: the plan covers {covered} layers, but the"
            f" model has {num_layers}" + missing * (covered < num_layers),
            hint=f"the last entry must end at {num_layers}",
        )


def plan_problems(entries: Sequence[PlanEntry]) -> Iterator[Problem]:
    """Errors of a plan that show without the model and the workers."""
    if not entries:
        yield Problem("shard_plan", "must not be empty")
        return
    if entries[0].id != "local":
        yield Problem("shard_plan[0].id", 'must be "local": the coordinator holds the first stage')
    expected = 0
    for i, entry in enumerate(entries):
        here, last = f"shard_plan[{i}]", i == len(entries) - 1
        start, end = entry.start, entry.end
        if start > end:
            yield Problem(here, f"start {start} is after end {end}")
        elif start > expected:
            missing = layers_text(expected, start)
            whose = "the first entry must start at 0" if i == 0 else f"start it at {expected}"
            yield Problem(f"{here}.start", f"is {start}, so nobody holds {missing}; {whose}")
        elif start < expected:
            yield Problem(
                f"{here}.start",
                f"is {start}, but the entries before it already reach {expected}; entries are in"
                f" model order without overlap, so start it at {expected}",
            )
        elif start == end and not (i == 0 and end == 0) and not last:
            yield Problem(
                here,
                f"holds no layer (start = end = {start}); only the first entry (embedding) and the"
                " last one (head) may be without",
            )
        layers = max(0, end - start)
        if isinstance(entry.offload, int) and entry.offload > layers:
            yield Problem(
                f"{here}.offload", f"is {entry.offload}, but the stage has {layers} layers"
            )
        if entry.is_last and not last:
            yield Problem(f"{here}.is_last", "is true, but only the last entry holds the head")
        if entry.is_last is False and last:
            yield Problem(f"{here}.is_last", "is false, but this is the last entry")
        expected = max(expected, end)
    if expected == 0:
        yield Problem(
            "shard_plan",
            "covers no layer; the last entry must end at the number of layers of the model",
        )


def owner_problems(entries: Sequence[PlanEntry], ids: Sequence[int | str]) -> Iterator[Problem]:
    """Problems with owners in a plan that are no worker."""
    for i, entry in enumerate(entries):
        if entry.id != "local" and entry.id not in ids:
            yield Problem(f"shard_plan[{i}].id", _unknown_worker(entry.id, ids))


def _unknown_worker(worker_id: int | str, ids: Sequence[int | str]) -> str:
    for known in ids:
        if str(known) == str(worker_id):
            return f"{shown(worker_id)} is written {shown(known)} in workers; write both the same"
    names = ", ".join(['"local"', *(shown(i) for i in ids)])
    return f"{shown(worker_id)} is not a worker; there are: {names}"
