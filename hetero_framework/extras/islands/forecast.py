"""A forecast of an island's steps and traffic, reported before the run. Pure."""

from __future__ import annotations

from hetero_framework.config import Config
from hetero_framework.extras.islands.settings import IslandConfig
from hetero_framework.units import plural, size

FEW_ROUNDS = 10
"""With fewer synchronisations DiLoCo's outer optimizer hardly gets going, and the run does worse
than a run that sums its gradients."""
STEEP_ROUNDS = 100
"""In a good part of a run with fewer rounds the loss falls steeply, and averaging slows that."""
_WARM_UP = 10
"""Summed gradients in the first tenth of such a run made up for that (see decisions.md)."""
_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 0.95}  # per value; int8 for normally distributed values


def notes(config: Config, trained: int) -> list[str]:
    """Lines for `hetero check`, on a run that trains `trained` values."""
    steps = config.training.max_steps
    return island_lines(config.setting("island"), trained, steps if steps > 0 else None)


def island_lines(island: IslandConfig, trained: int, steps: int | None = None) -> list[str]:
    """Lines on an island that trains `trained` values, for `steps` steps of the data if known."""
    if island.sync_steps == 1:
        return [
            f"island {island.name} shares the samples of every step and sums its gradients:"
            f" {size(4 * trained)} to each other island and as much from it, in every step"
        ]
    sent = trained * _BYTES[island.compression]
    lines = [
        f"island {island.name} takes about {plural(island.sync_steps, 'step')} alone, then sends"
        f" {size(sent)} to each other island, in {plural(island.fragments, 'fragment')}:"
        f" 1/{4 * trained * island.sync_steps / sent:,.0f} of gradients in every step, as float32",
        f"the coordinator keeps {size(8 * trained)} in its memory beside its stages: what all agree"
        " on, and the outer optimizer",
    ]
    if steps is not None and (warning := short_run(island, steps, 2)) is not None:
        lines.append(f"warning: {warning}")
    return lines


def short_run(island: IslandConfig, steps: int, islands: int) -> str | None:
    """The reason why this run would do better with `sync_steps` 1 or a warm-up, if there is one.
    `steps` counts the steps of the data."""
    rounds = steps // (island.sync_steps * islands)
    warm_up = steps // _WARM_UP
    if island.sync_steps == 1 or rounds >= STEEP_ROUNDS:
        return None
    are = (
        f"{plural(steps, 'step')} are {plural(rounds, 'round')} of {plural(islands, 'island')} with"
        f" sync_steps {island.sync_steps}"
    )
    if rounds < FEW_ROUNDS:
        return (
            f"{are}: too few for an average to help; a run so short would rather have sync_steps 1"
            " or a smaller one"
        )
    if island.warmup_steps >= warm_up:
        return None
    return (
        f"{are}, for a good part where the loss falls steeply, which averages do not replace:"
        f" island.warmup_steps {warm_up} would do better"
    )
