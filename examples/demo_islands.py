"""Two islands on one machine, offline: they train one model by DiLoCo, and one of them is killed.

    make demo-islands        or        python examples/demo_islands.py

1. Make the small model and the data of `hetero demo`.
2. Start a lighthouse, and two islands: "attic", a coordinator with one worker, and "garage", a
   coordinator with two. Each takes steps alone; then they average their changes.
3. Kill garage's coordinator in the middle. Attic goes on; garage is started again with the same
   command, takes over where the group is, and trains on.

Everything lands in runs/islands, which is emptied first. The lighthouse needs torchft (Linux,
x86-64): pip install "hetero-framework[islands]".
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hetero_framework.extras.demo.commands import demo

RUN = Path(__file__).resolve().parents[1] / "runs" / "islands"
CUTS = {"attic": [3], "garage": [2, 4]}
LAYERS = 6
ROWS = ACCUMULATION = 4
END_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=64, help="of both islands together")
    parser.add_argument("--sync-steps", type=int, default=8, help="steps between two averages")
    arguments = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    (RUN / "data").mkdir(parents=True)

    demo.say("1. a tokenizer and a random model from the Python standard library")
    files = demo.sources()
    demo.make_model(RUN / "model", files)
    demo.write_samples(RUN / "data" / "train.jsonl", demo.pieces(files))

    demo.say("2. a lighthouse, and two islands: attic of two processes, garage of three")
    port, *ports = free_ports(4)
    with ExitStack() as stack:
        start(stack, "lighthouse", ["lighthouse", "--bind", f"127.0.0.1:{port}"])
        islands = {
            name: start(stack, name, train(name, settings(name, port, ports, arguments)))
            for name in CUTS
        }
        wait_for_step(RUN / "garage", arguments.steps // 3, islands["garage"])

        demo.say("3. garage's coordinator is killed, and started again with the same command")
        islands["garage"].kill()
        islands["garage"].wait()
        islands["garage"] = start(stack, "garage", train("garage", None))
        codes = {name: island.wait() for name, island in islands.items()}
    if any(codes.values()):
        print(f"an island has failed: {codes}; their lines are in {RUN}")
        return 1

    demo.say(f"done in {time.monotonic() - started:.0f} s")
    same = weights_of("attic") == weights_of("garage")
    print("\n".join(costs(same)))
    return 0 if same else 1


def settings(
    name: str, lighthouse: int, ports: list[int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The configuration of an island; the other's differs in machines, plan, name and folder."""
    bounds = [0, *CUTS[name], LAYERS]
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    own = ports[:1] if name == "attic" else ports[1:]
    return {
        "coordinator": machine,
        "workers": [{**machine, "id": k, "port": port} for k, port in enumerate(own, 1)],
        "shard_plan": [
            {"id": k or "local", "start": bounds[k], "end": bounds[k + 1]}
            for k in range(len(bounds) - 1)
        ],
        "model": {"name_or_path": str(RUN / "model")},
        "data": {"train": str(RUN / "data" / "train.jsonl"), "max_length": 64},
        "training": {
            "output_dir": str(RUN / name),
            "max_steps": arguments.steps,
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": ACCUMULATION,
            "learning_rate": 1e-3,
            "warmup_steps": 4,
            "visualize": False,
            "save_strategy": "no",
            "logging_steps": 4,
        },
        "island": {
            "name": name,
            "lighthouse": f"127.0.0.1:{lighthouse}",
            "min_islands": 1,
            "sync_steps": arguments.sync_steps,
            "fragments": 2,
            "compression": "int8",
        },
    }


def train(name: str, config: dict[str, Any] | None) -> list[str]:
    """The arguments that train an island; `config` is written unless it is None."""
    path = RUN / f"{name}.json"
    if config is not None:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return ["train", "--config", str(path)]


def start(stack: ExitStack, name: str, arguments: list[str]) -> subprocess.Popen[str]:
    """Start `hetero` with its output in the log `name`; end it when `stack` is left."""
    log = stack.enter_context((RUN / f"{name}.log").open("a", encoding="utf-8"))
    print(f"{name}$ hetero {' '.join(arguments)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "hetero_framework", *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(end, process)
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def steps_of(name: str) -> list[dict[str, Any]]:
    path = RUN / name / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(output: Path, step: int, run: subprocess.Popen[str]) -> None:
    while run.poll() is None:
        if any(line["step"] >= step for line in steps_of(output.name)):
            return
        time.sleep(0.1)
    sys.exit(f"an island ended too early; its lines are in {RUN}")


def weights_of(name: str) -> bytes:
    return (RUN / name / "model" / "model.safetensors").read_bytes()


def costs(same: bool) -> list[str]:
    """What the kill and the averages cost."""
    attic, garage = steps_of("attic"), steps_of("garage")
    committed = max(line["island"]["committed"] for line in attic)
    sent = sum(line["island"]["bytes_out"] for line in attic)
    waited = sum(line["island"].get("waited_s", 0.0) for line in attic)
    seconds = sum(line["step_seconds"] for line in attic)
    summed = len(weights_of("attic")) * len(attic)
    return [
        f"loss {attic[0]['loss']:.3f} -> {attic[-1]['loss']:.3f}; {committed} steps are committed",
        f"attic took {len(attic)} of them, garage {len(garage)} since it was started again",
        f"attic sent {sent / 2**20:.0f} MiB, its state for garage among them; gradients in float32 "
        f"after each of its steps would be {summed / 2**20:.0f} MiB",
        f"attic waited {waited:.1f} of {seconds:.0f} s for averages and for garage",
        f"the models of both islands are {'the same, byte for byte' if same else 'NOT THE SAME'}",
    ]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    sys.exit(main())
