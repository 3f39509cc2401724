"""What can be proven on one GPU, in some minutes: equal results, hidden copies, speed.

    python -m benchmarks.gpu                         # every check on the first GPU
    python -m benchmarks.gpu --only parity_fp32,copies --save
    python -m benchmarks.gpu --device cpu --tiny     # tries the script itself, without a GPU

Runs from a bare checkout. Several workers share the card; they, the coordinator and the training
are the product's own. Prints one JSON object per check: `ok`, or `skipped` with the reason.

parity_fp32, parity_bf16  losses, gradient norms and trained weights of a model cut 2 and 4 ways
              against one process on the same card; equal to the last bit where one process equals
              itself in a second run, else within the `tolerance` that is printed
lora_4bit     the same with 4-bit weights (bitsandbytes) and an adapter; its loss must fall
copies        transfers on their own streams beside matrix products: what arrives is right, and
              `hidden_share` is the share of the transfers' time that costs the computing nothing
llama_1b      tokens per second of a Llama of 1.1 billion random weights (bf16, all of them
              trained) cut 2 and 4 ways, against uncut; one card can only do one stage's work at a
              time, so 1.0 is the bound of `ratio_to_uncut`
overlap       from timeline.json of those runs: the share of the time that tensors were on their
              way during which that process computed. Processes that share a card take turns, so
              this is a hint and no proof; `compute_mode` says how they share it
fp16, padding_free, loss_chunks, compiled, lora_int8, optimizer_8bit, tied, several_stages
              parity as above with that feature
recompute     layers computed again in the backward against layers kept, with dropout
cpu_coordinator, wire_codecs   near a run without: other kinds of rounding are part of them
resume        from a checkpoint, under another plan, to the last bit
codecs        the same bits on the device as on the CPU
memory_returns, out_of_memory, estimate
              a run's memory comes back; a full card is told as that; peak against prediction

Without a GPU every check is skipped. Exit code 0: nothing failed; 1: a check failed; 2: packages
are missing. `--save` keeps the result under benchmarks/results. Ends by itself after --minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

CHECKS = (
    *("parity_fp32", "parity_bf16", "lora_4bit", "copies", "llama_1b", "overlap"),
    *("fp16", "padding_free", "loss_chunks", "compiled", "lora_int8", "optimizer_8bit", "tied"),
    *("recompute", "several_stages", "cpu_coordinator", "wire_codecs", "resume", "codecs"),
    *("memory_returns", "out_of_memory", "estimate"),
)
_PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "numpy"),
    *("msgpack", "pydantic", "psutil", "rich", "graphviz", "filelock", "jinja2"),
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `checks` are the names that --only leaves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="default: the first accelerator")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--only", help=f"checks, separated by commas: {', '.join(CHECKS)}")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for everything")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args(argv)
    options.checks = tuple(options.only.split(",")) if options.only else CHECKS
    unknown = set(options.checks) - set(CHECKS)
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    return options


def missing_packages() -> list[str]:
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def all_checks() -> dict[str, Callable[..., Any]]:
    """Every check by its name."""
    from benchmarks import gpu_checks, gpu_features

    return {check.__name__: check for check in (*gpu_checks.CHECKS, *gpu_features.CHECKS)}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    missing = missing_packages()
    if missing:
        reason = f"missing: python -m pip install {' '.join(missing)}"
        print(json.dumps({"check": "packages", "ok": False, "reason": reason}))
        return 2
    from benchmarks import gpu_checks  # imports what may be missing

    known = all_checks()
    return gpu_checks.run(
        options.device,
        {name: known[name] for name in options.checks},
        tiny=options.tiny,
        minutes=options.minutes,
        save=options.save,
    )


if __name__ == "__main__":
    sys.exit(main())
