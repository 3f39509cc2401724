"""Trains two stages in two processes on the emulated device, for the synchronisations they make.

python -m tests.emulated_device.syncs       # with HETERO_EMULATED_SYNCS=FILE
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks import TINY, Bench, small_run
from hetero_framework.core.devices import open_device

_LORA = {"adapter": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}}
_SDPA = {"model": {"attn_implementation": "sdpa"}}
CASES: dict[str, dict[str, Any]] = {
    "full": {"training": {}},
    "lora": {"training": {"gradient_checkpointing": True}, **_LORA},
    "stored": {
        "training": {"gradient_checkpointing": True, "activation_offloading": True},
        **_LORA,
    },
    "fp16": {"training": {"fp16": True}, **_LORA},
    "sdpa": {"training": {}, **_SDPA},
    "chunks": {"training": {"loss_chunk_tokens": 16}, **_SDPA},
    "padding_free": {
        "training": {"loss_chunk_tokens": 16},
        "data": {"padding_free": True},
        "model": {"attn_implementation": None},
    },
}


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Bench(open_device("cuda:0"), TINY, Path(folder), ["cuda:1"]) as bench,
    ):
        for name, settings in CASES.items():
            small_run(bench, name, [2], **settings)


if __name__ == "__main__":
    main()
