"""The `island` section: how this coordinator trains together with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hetero_framework.config import Config
from hetero_framework.config.host_names import split_address
from hetero_framework.config.problems import Problem
from hetero_framework.config.section import (
    FREE,
    PER_ISLAND,
    ReadIf,
    Seconds,
    Section,
    checked_id,
    with_unit,
)


def island_name(value: str) -> str:
    """`value` itself. Raises ValueError unless it can name an island."""
    if value in ("local", "lighthouse"):
        raise ValueError(f'"{value}" names the lighthouse; give the island another name')
    return checked_id(value, "a name")


class IslandConfig(Section):
    """One of several coordinators, each with workers of its own, that train one model together.
    Everything else in their files describes the same model, adapter and data. null: alone."""

    name: Annotated[str, FREE]
    """Name of this island, unique among islands: 1 to 64 letters, digits, '.', '_' or '-'."""
    lighthouse: Annotated[str, FREE]
    """Address and port of `hetero lighthouse`, where islands find each other, as
    "10.0.0.1:29510"."""
    min_islands: Annotated[int, with_unit("islands", ge=1), FREE] = 1
    """Minimum number of islands that train; fewer wait for others."""
    wait_s: Annotated[Seconds, FREE] = 86400.0
    """How long islands wait for `min_islands` (default: a day); then the run saves its state and
    ends."""
    sync_steps: Annotated[int, with_unit("steps", ge=1)] = 1
    """1: gradients are summed over the islands in every step. More: the number of steps that an
    island takes alone before the islands average their changes."""
    warmup_steps: Annotated[int, with_unit("steps", ge=0), ReadIf("sync_steps!=1")] = 0
    """Number of steps at the start of a run that sum their gradients, whatever sync_steps is:
    averages help once the loss no longer falls steeply."""
    method: Annotated[Literal["diloco", "local_sgd"], ReadIf("sync_steps!=1")] = "diloco"
    """How the average change is applied: as the gradient of an outer optimizer ("diloco"), or
    directly to the weights ("local_sgd"). This and all settings below except share have no effect
    where sync_steps is 1."""
    fragments: Annotated[int, with_unit("fragments", ge=1), ReadIf("sync_steps!=1")] = 1
    """Parts of the model, by layers, that are averaged one after the other within sync_steps."""
    delay_steps: Annotated[int, with_unit("steps", ge=0), ReadIf("sync_steps!=1")] = 0
    """Steps that go on while a fragment is averaged in the background."""
    mixing: Annotated[float, with_unit("share", ge=0, le=1), ReadIf("sync_steps!=1")] = 0.0
    """Share of an island's own weights that stays when a fragment comes back: 0 takes the average
    of all, 1 changes nothing here until the next time."""
    compression: Annotated[Literal["none", "bf16", "int8"], ReadIf("sync_steps!=1")] = "none"
    """How changes of the weights are rounded on their way between islands; the rounding error is
    added to the next change."""
    outer_learning_rate: Annotated[float, ReadIf("sync_steps!=1 and method=diloco")] = Field(
        default=0.7, gt=0
    )
    """Learning rate of the outer optimizer (SGD)."""
    outer_momentum: Annotated[float, ReadIf("sync_steps!=1 and method=diloco")] = Field(
        default=0.9, ge=0, lt=1
    )
    """Momentum of the outer optimizer, in Nesterov's form."""
    share: Annotated[Literal["auto"] | Annotated[float, with_unit("share", gt=0)], PER_ISLAND] = (
        "auto"
    )
    """This island's share of the samples, relative to the numbers of the others. "auto", for all
    islands or none: shares by measured speed."""

    @property
    def lighthouse_address(self) -> tuple[str, int]:
        return split_address(self.lighthouse)

    @field_validator("name")
    @classmethod
    def _name_is_usable(cls, value: str) -> str:
        return island_name(value)

    @field_validator("lighthouse")
    @classmethod
    def _lighthouse_is_an_address(cls, value: str) -> str:
        split_address(value)
        return value

    @model_validator(mode="after")
    def _synchronisations_do_not_overlap(self) -> IslandConfig:
        between = self.sync_steps // self.fragments
        if between == 0:
            raise ValueError(
                f"{self.fragments} fragments need at least as many sync_steps, not"
                f" {self.sync_steps}"
            )
        if self.delay_steps >= between:
            raise ValueError(
                f"delay_steps must be less than {between}, the sync_steps between two fragments:"
                " one is averaged at a time"
            )
        return self


def island_of(config: Config) -> IslandConfig:
    """The island section of a configuration that has it."""
    island = config.setting("island")
    assert isinstance(island, IslandConfig)
    return island


def disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions to other sections."""
    island, plan, training = (parts.get(name) for name in ("island", "shard_plan", "training"))
    if island is None:
        return
    if training is not None and not training.reads_text:
        yield Problem(
            "island",
            "is for models of texts: islands share weights, and neither running means nor the data"
            " set of an imported file; take it out",
        )
    if plan and island.fragments > plan[-1].end:
        yield Problem(
            "island.fragments",
            f"{island.fragments} fragments are more than the {plan[-1].end} layers of shard_plan",
        )
