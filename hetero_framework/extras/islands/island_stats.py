"""Traffic and waiting between islands, read from a run's metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_framework.errors import UserError, in_words
from hetero_framework.units import plural, seconds, share, size


@dataclass(frozen=True)
class BetweenIslands:
    """Sums over all steps of this island: seconds in them, and of these seconds in which averages
    were waited for, or sums of gradients and the decision on the step; beside these, those in which
    slower islands were."""

    members: tuple[str, ...]
    steps: int
    synchronised: int
    step_s: float
    waited_s: float
    for_others_s: float
    bytes_in: int
    bytes_out: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> list[str]:
        names = ", ".join(self.members)
        lines = [
            f"islands {names}: {plural(self.steps, 'step')} here sent {size(self.bytes_out)} to the"
            f" others, and got {size(self.bytes_in)}"
        ]
        if self.synchronised or self.waited_s:
            part = self.waited_s / self.step_s if self.step_s else 0.0
            outer = plural(self.synchronised, "outer synchronisation")
            lines.append(
                f"{outer if self.synchronised else 'sums of gradients'}: {seconds(self.waited_s)}"
                f" of {seconds(self.step_s)} were not hidden behind computing ({share(part)});"
                f" {seconds(self.for_others_s)} more were waited for slower islands"
            )
        return lines


def read_between(folder: Path) -> BetweenIslands | None:
    """None for a run without islands. Raises UserError for a file that is damaged."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if "island" in line]
        return _sums(steps) if steps else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from None


def _sums(lines: list[Mapping[str, Any]]) -> BetweenIslands:
    islands = [line["island"] for line in lines]
    return BetweenIslands(
        members=tuple(islands[-1]["members"]),
        steps=len(lines),
        synchronised=sum("synchronised" in island for island in islands),
        step_s=sum(line["step_seconds"] for line in lines),
        waited_s=sum(island.get("waited_s", 0.0) for island in islands),
        for_others_s=sum(island.get("for_others_s", 0.0) for island in islands),
        bytes_in=sum(island["bytes_in"] for island in islands),
        bytes_out=sum(island["bytes_out"] for island in islands),
    )


def data_step(line: Mapping[str, Any]) -> int:
    """The step of the data, counted from 1, that a line of metrics.jsonl is about."""
    taken = line.get("island", {}).get("data_step")
    return int(line["step"] if taken is None else taken + 1)
