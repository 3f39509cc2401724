"""What another plan costs a run that is under way.

    python -m benchmarks.replanning straggler
    python -m benchmarks.replanning change
    python -m benchmarks.replanning change --quantization nf4

`straggler`: a coordinator and two workers train an adapter over a small Llama. Their layers take
equal times, sleeping, until worker 1 becomes three times slower at step 30, and
`training.replan` is "auto". Printed are the plans that the run takes, when the step is as short as
that of the best plan (within 10 %; `best_s` is measured, on the same processes), what it is after
60 steps, and whether result and losses are those of one process to the bit.

`change`: a coordinator and two workers of this machine train an adapter over a random Llama of
about 200 MB. Boundaries move by one layer, there and back, and the seconds are printed that all
processes took to hold their new layers: `first_s` when nothing was loaded yet, `change_s` later.
With `--quantization` the frozen weights are quantised.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.codecs import save_texts, save_tokenizer
from benchmarks.machines import Machines, run_program
from benchmarks.network import free_ports
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.cluster.worker import serve
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.engine.loading import BuildStages, load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.extras import planner
from hetero_framework.models.adapters.adapter_plan import ADAPTER_WEIGHTS as ADAPTER
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress

LAYERS = 12
FORWARD_S, BACKWARD_S = 0.01, 0.02
"""Of a layer and micro-batch."""
SLOWER, SLOW_FROM, WITHIN = 3, 30, 60
"""Worker 1 takes so many times as long from this step on; so many steps are allowed to react."""
MICRO_BATCHES = 4
_AS_GOOD = 1.1
_WINDOW = 9  # steps whose median counts
CUTS = ((4, 8), (5, 8), (4, 8), (4, 7))
"""Where stages meet, in turn."""
CHANGES = 7


def save_model(
    folder: Path, hidden_size: int = 640, *, vocab_size: int = 4096, layers: int = LAYERS
) -> int:
    """A Llama with random weights in float32; its bytes."""
    settings = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=int(2.75 * hidden_size),
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def config_of(
    model: Path, quantization: str | None, cut: Sequence[int], ports: Sequence[int]
) -> Config:
    """A coordinator and two workers of this machine."""
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    bounds = [0, *cut, LAYERS]
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": k, "port": ports[k]} for k in (1, 2)],
            "shard_plan": [
                {"id": k or "local", "start": bounds[k], "end": bounds[k + 1]} for k in range(3)
            ],
            "model": {"name_or_path": str(model), "quantization": quantization},
            "adapter": {"r": 8},
            "training": {"output_dir": str(model.parent / "run")},
        }
    )


def change(hidden_size: int, quantization: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model, ports = Path(folder) / "model", free_ports(3)
        nbytes = save_model(model, hidden_size)
        seconds = []
        config = config_of(model, quantization, CUTS[0], ports)
        with Cluster(config, max_frame_bytes=DEFAULT_MAX_FRAME_BYTES) as cluster:
            cluster.start()
            for number in range(CHANGES + 1):
                plan = config_of(model, quantization, CUTS[number % len(CUTS)], ports)
                began = time.perf_counter()
                cluster.assemble(plan)
                seconds.append(time.perf_counter() - began)
    first, *later = seconds
    return {
        "case": "change of plan",
        "model_bytes": nbytes,
        "quantization": quantization,
        "first_s": round(first, 2),
        "change_s": round(statistics.median(later), 3),
        "each_s": [round(s, 3) for s in later],
    }


# -- a straggler --------------------------------------------------------------------------------


class Here:
    """No network of its own."""

    def enter(self) -> None: ...


def paced(slow_from: float) -> BuildStages:
    """Makes real stages that sleep for their layers, SLOWER times as long from a step on."""

    def build(
        config: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
    ) -> list[Stage]:
        stages = load_stages(config, specs, device, pool)
        for spec, stage in zip(specs, stages, strict=True):
            _slow_down(stage, spec.end - spec.start, slow_from)
        return stages

    return build


def _slow_down(stage: Any, layers: int, slow_from: float) -> None:
    step = 0

    def begin(info: StepInfo, take: Any, own: Callable[..., Any] = stage.begin) -> None:
        nonlocal step
        step = info.step
        own(info, take)

    def after(own: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slowed(*args: Any) -> Any:
            time.sleep(layers * seconds * (SLOWER if step >= slow_from else 1))
            return own(*args)

        return slowed

    stage.begin = begin
    stage.forward = after(stage.forward, FORWARD_S)
    stage.backward = after(stage.backward, BACKWARD_S)
    stage.forward_backward = after(stage.forward_backward, FORWARD_S + BACKWARD_S)


def work(connection: Any, raw: dict[str, Any], worker: int, slow_from: float) -> None:
    """A worker process; the first one becomes slow."""
    build = paced(slow_from if worker == 1 else math.inf)
    serve(Config.from_dict(raw), worker, build=build, keep=True)


def small_run(
    folder: Path, name: str, plan: Sequence[Mapping[str, Any]], ports: Sequence[int], **changes: Any
) -> Config:
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu", "num_threads": 1}
    owners = {entry["id"] for entry in plan}
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": k, "port": ports[k]} for k in (1, 2) if k in owners],
            "shard_plan": [{k: entry[k] for k in ("id", "start", "end")} for entry in plan],
            "model": {"name_or_path": str(folder / "model"), "tokenizer": str(folder / "words")},
            "data": {"train": str(folder / "texts.jsonl"), "max_length": 32},
            "adapter": {"r": 4},
            "training": {
                "output_dir": str(folder / name),
                "gradient_accumulation_steps": MICRO_BATCHES,
                "per_device_train_batch_size": 1,
                "save_strategy": "no",
                "report_to": "none",
                "visualize": False,
                "verify_architecture": False,
                "timeline_steps": 0,
                "log_level": "WARNING",
                **changes,
            },
        }
    )


def best_plan() -> Sequence[Mapping[str, Any]]:
    """The planner's, told what each layer takes once worker 1 is slower."""
    devices = [
        {
            "id": id,
            "memory_bytes": 1e12,
            "layer_forward_s": FORWARD_S * (SLOWER if id == 1 else 1),
            "layer_backward_s": BACKWARD_S * (SLOWER if id == 1 else 1),
        }
        for id in ("local", 1, 2)
    ]
    links = [
        {"from": one, "to": other, "bytes_per_s": 1e9, "latency_s": 1e-4}
        for one, other in itertools.permutations(("local", 1, 2), 2)
    ]
    fleet = {"version": 1, "layers": LAYERS, "micro_batches": MICRO_BATCHES, "links": links}
    fleet |= {"devices": devices, "activation_bytes": 4096, "gradient_bytes": 4096}
    return planner.plan(planner.FleetProfile.from_dict(fleet), allow=()).shard_plan


def run(folder: Path, config: Config, slow_from: float, *, pace: bool = True) -> list[Any]:
    """The lines of metrics.jsonl of a run with its workers."""
    raw = config.to_dict()
    with Machines() as machines:
        for worker in config.workers:
            machines.start(Here(), work, raw, worker.id, slow_from)
        with (folder / "run.log").open("a", encoding="utf-8") as log:
            build = paced(math.inf) if pace else load_stages
            train(config, progress=Progress(log), build=build)
    text = (config.output_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def straggler(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = [{"id": "local", "start": 0, "end": LAYERS}]
    third = LAYERS // 3
    even = [{"id": k or "local", "start": k * third, "end": (k + 1) * third} for k in range(3)]
    with tempfile.TemporaryDirectory() as name:
        folder, ports, best = Path(name), free_ports(3), best_plan()
        save_model(folder / "model", 64)
        save_tokenizer(folder / "words")
        save_texts(folder / "texts.jsonl", MICRO_BATCHES * steps)
        alone = run(
            folder, small_run(folder, "whole", whole, ports, max_steps=steps), 0, pace=False
        )
        changes = {"max_steps": steps, "replan": "auto"}
        found = run(folder, small_run(folder, "run", even, ports, **changes), SLOW_FROM)
        known = run(folder, small_run(folder, "best", best, ports, max_steps=40), 0)
        results = [(folder / n / "adapter" / ADAPTER).read_bytes() for n in ("whole", "run")]
        lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        taken = [event for event in map(json.loads, lines) if event["what"] == "plan changed"]
    step_s = [line["step_seconds"] for line in found]
    best_s = statistics.median(line["step_seconds"] for line in known[10:])
    is_as_good = (
        k
        for k in range(SLOW_FROM, len(step_s) - _WINDOW)
        if statistics.median(step_s[k : k + _WINDOW]) <= _AS_GOOD * best_s
    )
    after_s = statistics.median(step_s[SLOW_FROM + WITHIN :])
    return {
        "case": "straggler",
        "steps": steps,
        "before_s": round(statistics.median(step_s[10:SLOW_FROM]), 3),
        "slow_s": round(statistics.median(step_s[SLOW_FROM : SLOW_FROM + 15]), 3),
        "after_s": round(after_s, 3),
        "best_s": round(best_s, 3),
        "ratio": round(after_s / best_s, 3),
        "as_good_after": next(is_as_good, math.inf) - SLOW_FROM,
        "changes": [[event["to_step"], event["plan"], event["reason"]] for event in taken],
        "best": best,
        "equal": results[0] == results[1]
        and [line["loss"] for line in found] == [line["loss"] for line in alone],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    changes = commands.add_parser("change")
    changes.add_argument("--hidden-size", type=int, default=640)
    changes.add_argument("--quantization", choices=("nf4", "int8"))
    slow = commands.add_parser("straggler")
    slow.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    if options.command == "change":
        found = change(options.hidden_size, options.quantization)
    else:
        found = straggler(options.steps)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_program(main)
