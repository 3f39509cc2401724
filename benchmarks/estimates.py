"""The estimates of `hetero plan --dry-run` beside speeds that others published.

    python -m benchmarks.estimates
    python -m benchmarks.estimates --trust high

The cases are in published.json, with their sources and what is not known about them. A case's
estimate is that of one device and one micro-batch, as if it had the memory, without the optimizer's
step. Prints a table. Of the cases of high trust, fitted and held out, it also prints the least and
the largest ratio of ours to theirs, and the geometric mean of the deviation: 0.8 counts as 1.25.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetero_framework.config import Config
from hetero_framework.extras.planner.estimate import estimate_fleet

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
_TARGETS = ("all-linear",)


def estimated(case: Mapping[str, Any], device: str | None = None) -> float:
    """Our tokens per second for a case, on its device or another."""
    job = (case["model"], case["method"], case["rows"], case["tokens"])
    adapted = tuple(case.get("targets", _TARGETS)), case.get("layers")
    return (
        case["rows"]
        * case["tokens"]
        / _seconds(*job, *adapted, case["recompute"], device or case["device"])
    )


@cache
def _seconds(
    model: str, method: str, rows: int, tokens: int, targets: Sequence[str], layers: int | None,
    recompute: bool, device: str,
) -> float:  # fmt: skip
    """The estimated seconds of a micro-batch on one device."""
    fields = PUBLISHED["models"][model]
    count = fields["num_hidden_layers"]
    adapter = {"r": 16, "target_modules": targets[0] if targets == _TARGETS else list(targets)}
    if layers is not None:
        adapter["layers_to_transform"] = list(range(count - layers, count))
    raw = {
        "coordinator": {"ip": "127.0.0.1"},
        "workers": [],
        "shard_plan": [{"id": "local", "start": 0, "end": count}],
        "model": {"quantization": "nf4" if method == "qlora" else None},
        "data": {"train": "none", "max_length": tokens},
        "training": {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1},
        **({} if method == "full" else {"adapter": adapter}),
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        raw["model"]["name_or_path"] = folder
        profile, _ = estimate_fleet(Config.from_dict(raw), [f"local={device}"], [])
    (cost,) = profile.devices
    ends = ("embedding_forward_s", "embedding_backward_s", "head_forward_s", "head_backward_s")
    passes = ["layer_forward_s", "layer_backward_s", *["layer_recompute_s"] * recompute]
    return sum(getattr(cost, name) for name in ends) + sum(
        seconds * (1 if len(of_layers) == count else count)
        for of_layers in (getattr(cost, name) for name in passes)
        for seconds in of_layers
    )


def compared(trust: Sequence[str] = ("high", "medium", "low")) -> Iterator[dict[str, Any]]:
    """The cases with our estimate and its ratio to the published speed."""
    for case in PUBLISHED["cases"]:
        if case["trust"] in trust:
            ours = estimated(case)
            yield {**case, "ours": ours, "ratio": ours / case["tokens_per_s"]}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of some cases: how many, least, largest, geometric mean of the deviation."""
    ratios = [row["ratio"] for row in rows]
    mean = math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios))
    return {"cases": len(ratios), "least": min(ratios), "most": max(ratios), "deviation": mean}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trust", nargs="+", default=["high", "medium", "low"])
    rows = list(compared(parser.parse_args(argv).trust))
    for row in rows:
        job = f"{row['model']} {row['method']}{' again' if row['recompute'] else ''}"
        size = f"{row['rows']} x {row['tokens']}"
        rates = f"{row['tokens_per_s']:>9,.0f}{row['ours']:>9,.0f}{row['ratio']:>7.2f}"
        known = f"  {row['trust']} {row['use']}"
        print(f"{row['source']:13}{job:26}{row['device']:20}{size:>10}{rates}{known}")
    for use in ("fit", "held"):
        if chosen := [row for row in rows if (row["trust"], row["use"]) == ("high", use)]:
            print(use, json.dumps(summary(chosen)))


if __name__ == "__main__":
    main()
