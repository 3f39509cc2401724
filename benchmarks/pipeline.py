"""A whole step of the pipeline with stages that sleep: what the engine and the wire cost.

    python -m benchmarks.pipeline --stages 4 --micro-batches 16 --forward-ms 20 --backward-ms 40

Everything but the stages is what training uses: worker processes, links over the loopback, the
coordinator that relays between workers and computes the first stage. Sleeping costs no CPU, so two
cores can play any number of devices. The same processes run two engines in turn, step by step:
ours with its window of micro-batches in flight, and one micro-batch at a time. A step lasts from
its announcement until every worker has committed. `bound` is the 1F1B bound (m + p - 1)(F + B);
`ratio` is the median step over it, 1 means that nothing but the stages takes time;
`simulated_ratio` is what the policy alone reaches with free transfers.

`relay_cpu_ms` is the coordinator's CPU time for one boundary tensor that it receives and sends:
those that it relays, and its own stage's output and gradient, which are sent and received once
each. Prints one JSON object per engine; `--save` keeps them under benchmarks/results. `--slow-ms`
makes every forward slower than the bound is told, to see that the measurement notices.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import environment
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.dal import Device, open_device
from hetero_framework.core.protocol import DEFAULT_MAX_FRAME_BYTES, Message, MessageType
from hetero_framework.trainer.peers import Peers
from hetero_framework.trainer.pipeline import Pipeline
from hetero_framework.trainer.schedule import one_f_one_b_bound, simulate, window_size
from hetero_framework.trainer.verbs import GradientReport, StatePart, StepInfo, Tensors
from hetero_framework.trainer.worker import serve

_HOST = "127.0.0.1"
_ROW_ELEMENTS = 1024


class SleepStage:
    """A stage that takes its time and hands on tensors of the right size."""

    input_requires_grad = True

    def __init__(self, spec: StageSpec, forward_s: float, backward_s: float, nbytes: int) -> None:
        self.index = spec.index
        self.is_first = spec.is_first
        self.is_last = spec.is_last
        self._forward_s = forward_s
        self._backward_s = backward_s
        rows = max(1, nbytes // (2 * _ROW_ELEMENTS))
        self._result_BSD = torch.ones(1, rows, _ROW_ELEMENTS, dtype=torch.bfloat16)

    def begin(self, info: StepInfo) -> None:
        """Nothing to prepare."""

    def forward(
        self, micro_batch: int, inputs: Tensors, hidden_BSD: torch.Tensor | None
    ) -> torch.Tensor:
        time.sleep(self._forward_s)
        return self._result_BSD

    def forward_backward(
        self, micro_batch: int, inputs: Tensors, hidden_BSD: torch.Tensor | None
    ) -> tuple[float, torch.Tensor | None]:
        time.sleep(self._forward_s + self._backward_s)
        return 1.0, self._result_BSD

    def evaluate(self, micro_batch: int, inputs: Tensors, hidden_BSD: torch.Tensor | None) -> float:
        time.sleep(self._forward_s)
        return 1.0

    def backward(self, micro_batch: int, gradient_BSD: torch.Tensor | None) -> torch.Tensor | None:
        time.sleep(self._backward_s)
        return None if self.is_first else self._result_BSD

    def collect(self, tied_gradient: torch.Tensor | None = None) -> GradientReport:
        return GradientReport(torch.ones(1))

    def commit(self, learning_rate: float, grad_scale: float) -> None:
        """No weights, nothing to step."""

    def abort(self) -> None:
        """Nothing is kept."""

    def trainable(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"stage{self.index}.weight", (self.index,))]

    def state(self, kind: str) -> Iterator[StatePart]:
        yield StatePart({}, last=True)

    def load_state(self, kind: str, part: StatePart) -> None:
        """No state."""

    def tied_weight(self) -> torch.Tensor | None:
        return None

    def set_tied_weight(self, weight: torch.Tensor) -> None:
        """No weight."""


@dataclass(frozen=True)
class Load:
    """What is played: the pipeline's size, seconds per stage, bytes per boundary tensor."""

    stages: int = 4
    micro_batches: int = 16
    forward_s: float = 0.020
    backward_s: float = 0.040
    activation_bytes: int = 2_100_000
    slow_s: float = 0.0

    def build(self, config: Config, specs: Sequence[StageSpec], device: Device) -> list[SleepStage]:
        forward_s = self.forward_s + self.slow_s
        return [SleepStage(s, forward_s, self.backward_s, self.activation_bytes) for s in specs]


@dataclass
class Samples:
    """What the steps of one engine took."""

    window: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    busy_share: list[list[float]] = field(default_factory=list)


def make_config(stages: int) -> Config:
    """One stage per process, the first one here, the others at free ports of this machine."""
    held = [socket.create_server((_HOST, 0)) for _ in range(stages)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    machine = {"hostname": "localhost", "ip": _HOST, "device": "cpu"}
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": k, "port": ports[k]} for k in range(1, stages)],
            "shard_plan": [{"id": k or "local", "start": k, "end": k + 1} for k in range(stages)],
        }
    )


@contextmanager
def worker_processes(config: Config, load: Load) -> Iterator[None]:
    """The workers of `config` with sleeping stages, until the block ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "config.json"
        path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
        times = [load.forward_s, load.backward_s, load.slow_s]
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.pipeline", "--worker", str(worker.id)]
                    + ["--config", str(path), "--stages", str(load.stages)]
                    + ["--activation-mb", str(load.activation_bytes / 1e6)]
                    + ["--forward-ms", str(times[0] * 1e3), "--backward-ms", str(times[1] * 1e3)]
                    + ["--slow-ms", str(times[2] * 1e3)]
                )
            )
            for worker in config.workers
        ]
        try:
            yield
        except BaseException:
            for process in processes:
                process.kill()
            raise


def start(config: Config, peers: Peers) -> None:
    """What a cluster does before the first step: connect, set the workers up, start them."""
    peers.connect_all()
    specs = config.stages()
    for worker in peers.workers:
        own = [
            {
                "index": spec.index,
                "start": spec.start,
                "end": spec.end,
                "is_first": spec.is_first,
                "is_last": spec.is_last,
            }
            for spec in specs
            if spec.owner == worker
        ]
        setup = {
            "config": config.to_dict(),
            "stages": own,
            "num_stages": len(specs),
            "num_layers": specs[-1].end,
            "settings": {},
        }
        peers.send(worker, Message(MessageType.SETUP, setup))
    waiting = set(peers.workers)
    while waiting:
        event = peers.receive(1.0)
        if event is not None and event.message is not None:
            waiting.discard(event.worker)
    for worker in peers.workers:
        entries = [
            {"index": spec.index, "input_requires_grad": True}
            for spec in specs
            if spec.owner == worker
        ]
        peers.send(worker, Message(MessageType.START, {"stages": entries}))


def step(pipeline: Pipeline, number: int, batches: Sequence[Tensors]) -> list[float]:
    """One training step; each stage's busy seconds."""

    def give_up(lost: Exception) -> None:
        raise lost

    pipeline.begin(StepInfo(number, 0, train=True, micro_batches=len(batches), num_items=1))
    pipeline.run(batches)
    pipeline.collect()
    stages = pipeline.commit(learning_rate=0.0, grad_scale=1.0, recover=give_up)
    return [stages[k].busy_s for k in sorted(stages)]


def measure(load: Load, windows: dict[str, int], steps: int) -> dict[str, Samples]:
    """Run `steps` steps with each window, in turn, after one that warms the links up."""
    config = make_config(load.stages)
    tokens = torch.ones(1, 16, dtype=torch.int64)
    batches = [
        {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    ] * load.micro_batches
    peers = Peers(
        config,
        "benchmark",
        DEFAULT_MAX_FRAME_BYTES,
        note=lambda text: print(text, file=sys.stderr),
    )
    samples = {name: Samples(window) for name, window in windows.items()}
    with worker_processes(config, load):
        try:
            start(config, peers)
            specs = config.stages()
            local = load.build(config, specs[:1], open_device("cpu"))
            pipelines = {
                name: Pipeline(specs, local, peers, window=window, step_timeout_s=60.0)
                for name, window in windows.items()
            }
            number = 0
            for turn in range(-1, steps):
                for name, pipeline in pipelines.items():
                    sent = sum(b_in + b_out for b_in, b_out, _ in peers.traffic().values())
                    cpu, began = time.process_time(), time.perf_counter()
                    busy_s = step(pipeline, number, batches)
                    seconds = time.perf_counter() - began
                    number += 1
                    if turn < 0:
                        continue
                    done = samples[name]
                    done.seconds.append(seconds)
                    done.cpu_s.append(time.process_time() - cpu)
                    now = sum(b_in + b_out for b_in, b_out, _ in peers.traffic().values())
                    done.wire_bytes.append(now - sent)
                    done.busy_share.append([busy / seconds for busy in busy_s])
        finally:
            peers.close(Message(MessageType.BYE, {"reason": "the benchmark is over"}))
    return samples


def summarise(name: str, load: Load, samples: Samples) -> dict[str, Any]:
    """The figures of one engine. Seconds, bytes; shares of 1."""
    p, m = load.stages, load.micro_batches
    forward_s, backward_s = [load.forward_s] * p, [load.backward_s] * p
    bound = one_f_one_b_bound(forward_s, backward_s, m)
    median = statistics.median(samples.seconds)
    handled = m * (2 * (p - 1) - 1)
    return {
        "engine": name,
        "window": samples.window,
        "step_s": round(median, 4),
        "step_s_min": round(min(samples.seconds), 4),
        "step_s_max": round(max(samples.seconds), 4),
        "bound_s": round(bound, 4),
        "ratio": round(median / bound, 4),
        "simulated_ratio": round(
            simulate(forward_s, backward_s, m, samples.window).seconds / bound, 4
        ),
        "busy_share": [
            round(statistics.median(shares), 3) for shares in zip(*samples.busy_share, strict=True)
        ],
        "wire_bytes_per_step": int(statistics.median(samples.wire_bytes)),
        "relay_cpu_ms": round(statistics.median(samples.cpu_s) / handled * 1e3, 3),
        "steps": len(samples.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--backward-ms", type=float, default=40.0)
    parser.add_argument("--activation-mb", type=float, default=2.1, help="10^6 bytes per boundary")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--window", type=int, help="micro-batches in flight; default 2 x stages")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="slow every forward")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    load = Load(
        stages=options.stages,
        micro_batches=options.micro_batches,
        forward_s=options.forward_ms / 1e3,
        backward_s=options.backward_ms / 1e3,
        activation_bytes=int(options.activation_mb * 1e6),
        slow_s=options.slow_ms / 1e3,
    )
    torch.set_num_threads(1)
    if options.worker is not None:
        config = Config.from_dict(json.loads(options.config.read_text(encoding="utf-8")))
        serve(config, options.worker, build=load.build, say=lambda text: None)
        return
    load_before = psutil.getloadavg()[0]
    windows = {"pipeline": window_size(load.stages, options.window), "one in flight": 1}
    samples = measure(load, windows, options.steps)
    engines = [summarise(name, load, taken) for name, taken in samples.items()]
    for engine in engines:
        print(json.dumps(engine))
    if options.save:
        names = ("stages", "micro_batches", "forward_ms", "backward_ms", "activation_mb", "slow_ms")
        whole = {
            "engines": engines,
            "settings": {name: getattr(options, name) for name in names},
            "load_average_before": round(load_before, 2),
            "environment": environment.describe(),
        }
        print(f"saved {environment.save('pipeline', whole)}", file=sys.stderr)


if __name__ == "__main__":
    main()
