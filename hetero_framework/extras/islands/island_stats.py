"""Traffic and waiting between islands, read from a run's metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_framework.trainer.read_metrics import read_steps
from hetero_framework.units import plural, seconds, share, size


def read_between(folder: Path) -> dict[str, Any] | None:
    """Sums over all steps of this island, as JSON types. `waited_s` are the seconds of waiting for
    averages, or for sums of gradients and the decision on the step. `for_others_s`, beside these,
    are the seconds of waiting for slower islands. None for a run without islands. Raises UserError
    for a damaged file."""
    return read_steps(folder, _sums)


def _sums(steps: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    lines = [line for line in steps if "island" in line]
    islands = [line["island"] for line in lines]
    if not islands:
        return None
    return {
        "members": list(islands[-1]["members"]),
        "steps": len(lines),
        "synchronised": sum("synchronised" in island for island in islands),
        "step_s": sum(line["step_seconds"] for line in lines),
        **{k: sum(island.get(k, 0.0) for island in islands) for k in ("waited_s", "for_others_s")},
        **{k: sum(island[k] for island in islands) for k in ("bytes_in", "bytes_out")},
    }


def text(between: Mapping[str, Any]) -> Iterator[str]:
    """The sums as lines for the user."""
    yield (
        f"islands {', '.join(between['members'])}: {plural(between['steps'], 'step')} here sent"
        f" {size(between['bytes_out'])} to the others, and got {size(between['bytes_in'])}"
    )
    waited_s, step_s, count = (between[name] for name in ("waited_s", "step_s", "synchronised"))
    if count or waited_s:
        what = plural(count, "outer synchronisation") if count else "sums of gradients"
        yield (
            f"{what}: {seconds(waited_s)} of {seconds(step_s)} were not"
            f" hidden behind computing ({share(waited_s / step_s if step_s else 0.0)});"
            f" {seconds(between['for_others_s'])} more were waited for slower islands"
        )
