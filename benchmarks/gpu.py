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
stream_frozen layers that visit the card from host memory: the bits of those that are held there; on
              a real card also the tokens per second of both at 512 to 4,096 tokens a micro-batch,
              of 1.1 billion weights in bfloat16 and in 4 bits
stream_trained   trained layers that visit the card with their gradients and states: the bits
stream_8b     the figures of stream_frozen of 8 billion weights in 4 bits
offload_optimizer   optimizer states and stored inputs in host memory: the bits, and the peaks
memory_returns, out_of_memory, estimate
              a run's memory comes back; a full card is told as that; peak against prediction

Without a GPU every check is skipped. A check may take three times its share of the time that is
left; one that takes longer, or ends its process, has failed, and the others go on in a new process.
Exit code 0: nothing failed; 1: a check failed; 2: packages are missing, with the commands that
bring them to a machine without a network. `--save` keeps the result under benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

CHECKS = (
    *("parity_fp32", "parity_bf16", "lora_4bit", "copies", "llama_1b", "overlap"),
    *("fp16", "padding_free", "loss_chunks", "compiled", "lora_int8", "optimizer_8bit", "tied"),
    *("recompute", "several_stages", "cpu_coordinator", "wire_codecs", "resume", "codecs"),
    *("stream_frozen", "stream_trained", "stream_8b", "offload_optimizer"),
    *("memory_returns", "out_of_memory", "estimate"),
)
_PACKAGES = {
    **{name: name for name in ("torch", "transformers", "accelerate", "peft", "safetensors")},
    **{name: name for name in ("tokenizers", "numpy", "datasets", "cryptography", "msgpack")},
    **{name: name for name in ("typing_extensions", "xxhash", "graphviz", "psutil", "rich")},
    **{name: name for name in ("tensorboard", "jinja2", "filelock", "pydantic", "pydantic_core")},
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
}
"""What runs need, as it is imported and as it is installed."""
_ROOT = Path(__file__).resolve().parents[1]
_START_S = 240.0
_SHARES = 3

Result = dict[str, Any]


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
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the child's part
    options = parser.parse_args(argv)
    options.checks = tuple(options.only.split(",")) if options.only else CHECKS
    unknown = set(options.checks) - set(CHECKS)
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    return options


def missing_packages() -> list[str]:
    """The names to install."""
    return [dist for name, dist in _PACKAGES.items() if importlib.util.find_spec(name) is None]


def how_to_bring(packages: Sequence[str]) -> str:
    """The commands that install `packages` here, with a network and without."""
    names = " ".join(packages)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    download = f"download --no-deps --only-binary=:all: --python-version {python}"
    if sys.platform == "linux":
        download += f" --platform manylinux_2_28_{platform.machine()}"
    return (
        f"missing: {names}. Run: python -m pip install {names}. Without a network: on another "
        f"machine `python -m pip {download} --dest wheels {names}`, bring the folder, and "
        f"`python -m pip install --no-deps --no-index --find-links wheels {names}`"
    )


def all_checks() -> dict[str, Callable[..., Any]]:
    """Every check by its name."""
    from benchmarks import gpu_checks, gpu_features

    return {check.__name__: check for check in (*gpu_checks.CHECKS, *gpu_features.CHECKS)}


class Child:
    """A process that does some checks; it prints a line for each. A context manager."""

    def __init__(self, checks: Sequence[str], options: argparse.Namespace, folder: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--device", options.device]
        command += ["--only", ",".join(checks), *(["--tiny"] if options.tiny else [])]
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "TMPDIR": folder, "TEMP": folder},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def next_line(self, seconds: float) -> Result | str | None:
        """The next line of results, None where the process ended as it should, or what failed."""
        ends = time.monotonic() + seconds
        try:
            while (line := self._lines.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
                if line.startswith("{"):
                    return dict(json.loads(line))
                print(line, end="", file=sys.stderr)  # a library's
        except queue.Empty:
            return f"not done within its share of the time, {seconds:.0f} s; --minutes sets all"
        code = self._process.wait()
        return f"its process ended with exit code {code}" if code else None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()  # its workers end with it
        self._process.wait()
        self._reader.join()


def supervise(options: argparse.Namespace, show: Callable[[Result], None]) -> None:
    """Do the checks, each for at most its share of the time; `show` gets a line for each."""
    ends = time.monotonic() + options.minutes * 60
    left = list(options.checks)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        while left and time.monotonic() < ends:
            with Child(left, options, folder) as child:
                name, limit = "start", _START_S
                while left:
                    line = child.next_line(min(limit, ends - time.monotonic()))
                    if line is None and name == "start":
                        line = "its process did nothing"
                    if isinstance(line, str):
                        show({"check": name, "ok": False, "reason": line})
                        if name == "start":
                            return
                        left.pop(0)
                    elif line is not None:
                        show(line)
                        left = left[1:] if "check" in line else left
                    if not left or not isinstance(line, dict):
                        break
                    name, limit = left[0], _SHARES * (ends - time.monotonic()) / len(left)
    for name in left:
        show({"check": name, "ok": False, "reason": f"not run: {options.minutes:g} minutes over"})


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if missing := missing_packages():
        print(json.dumps({"check": "packages", "ok": False, "reason": how_to_bring(missing)}))
        return 2
    if options.here:
        from benchmarks import gpu_checks  # imports what may be missing

        known = all_checks()
        checks = {name: known[name] for name in options.checks}
        gpu_checks.run(options.device, checks, tiny=options.tiny)
        return 0
    lines: list[Result] = []

    def show(line: Result) -> None:
        print(json.dumps(line), flush=True)
        lines.append(line)

    supervise(options, show)
    if options.save:
        from benchmarks import environment

        about = next((line for line in lines if "check" not in line), {})
        results = [line for line in lines if "check" in line]
        whole = {"benchmark": "gpu", **about, "checks": results}
        whole["environment"] = environment.describe()
        print(f"saved {environment.save('gpu', whole)}", file=sys.stderr)
    return int(any(line.get("ok") is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
