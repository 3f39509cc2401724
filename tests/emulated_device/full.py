"""Trains on the emulated device, whose memory is full from one place of a run on.

    python -m tests.emulated_device.full        # with HETERO_EMULATED_FULL=FILE

Prints one JSON object for each place: the exit code that the run would have, and what it says.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks import TINY, Bench, Quiet, small_run
from hetero_framework.core.devices import open_device
from hetero_framework.errors import as_hetero_error

PLACES = (
    *("load *", "forward 2", "backward 2", "norms 2", "commit 1", "evaluation *"),
    *("state-part *", "gather *"),
)
"""Failpoints and steps. The optimizer makes its state in the first step."""
COORDINATOR, WORKER = 0, 1
"""Their devices."""


def main() -> None:
    place_file = Path(os.environ["HETERO_EMULATED_FULL"])
    place_file.write_text("")
    with (
        tempfile.TemporaryDirectory() as folder,
        Bench(open_device("cuda:0"), TINY, Path(folder), ["cuda:1"]) as bench,
    ):
        for device in (COORDINATOR, WORKER):
            for place in PLACES:
                place_file.write_text(f"{device} {place}")
                line = {"device": device, "place": place, **outcome(bench)}
                print(json.dumps(line), flush=True)


def outcome(bench: Bench) -> dict[str, Any]:
    """`first`: what was said before the step was done again."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    training = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    data = {"eval": str(bench.folder / "texts.jsonl")}
    adapter = {"r": 4, "lora_alpha": 8}
    quiet = Quiet()
    try:
        small_run(bench, "full", [2], training=training, data=data, adapter=adapter, progress=quiet)
    except Exception as error:
        told = as_hetero_error(error)  # as the command does
        if told is None:
            raise
        first = [line for line in quiet.lines if "memory ran out" in line]
        return {"code": told.exit_code, "said": str(told), "first": "".join(first[:1])}
    return {"code": 0}


if __name__ == "__main__":
    main()
