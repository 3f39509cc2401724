"""Sampling in groups: beside the bound of sleeping stages, one text at a time, and generate.

    python -m benchmarks.sampling --save

Three stages that sleep for 20 ms continue six groups of eight texts by 24 tokens, and then, with
the same stages, one text by as many: `of_bound` is what the stage slept that slept longest, over
the time of the whole; `speed_up` the ratio of both ways' tokens per second. And a small Llama in
this process continues a prompt by eight texts, greedily, in turn with transformers' own generate
over the same batch, with the same tokens: `of_generate` is the ratio of tokens per second. All are
medians over rounds, of pairs where there are two ways. Each result is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.environment import describe, save
from benchmarks.machines import run_program
from benchmarks.network import open_network
from benchmarks.pipeline import Engine, Product, access, slept_seconds
from benchmarks.stages import Llama, Load, SleepStage
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.core.messages import Decoding
from hetero_framework.engine.stage_api import Outcome, StageInterface, StepInfo, Tensors
from hetero_framework.errors import HeteroError
from hetero_framework.extras.talking.sampling import SampleRequest, SampleResult
from hetero_framework.extras.talking.text_generation import (
    DRAWS,
    LOGPROBS,
    TOKENS,
    TextGeneration,
)
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.models.cut.side import Bundle

SECONDS, GROUPS, SAMPLES, NEW = 0.02, 6, 8, 24
LIMIT_S = 600.0
LLAMA = Llama(4, 128, vocabulary=1024)
PROMPT, NEW_OF_LLAMA = tuple(range(3, 35)), 96


class AnsweringStage(SleepStage):
    """A stage that sleeps; the last one answers with token 1."""

    def evaluate(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Outcome:
        super().evaluate(micro_batch, inputs, received)
        rows = (len(inputs[DRAWS]) - 4) // 2
        tokens = torch.ones(rows, dtype=torch.int64)
        return Outcome(0.0, {TOKENS: tokens, LOGPROBS: torch.zeros(rows)})


@dataclass(frozen=True)
class Answering(Load):
    """A case whose stages sleep and answer."""

    def build(
        self, config: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
    ) -> list[StageInterface]:
        super().build(config, specs, device, pool)  # forgets what slept before
        return [AnsweringStage(spec, self) for spec in specs]


def sampled(
    cluster: Cluster, requests: Sequence[SampleRequest], at_once: int
) -> tuple[list[SampleResult], float]:
    """The results, and tokens per second."""
    texts = TextGeneration(
        requests, max_positions=None, ends=(), vocabulary=1 << 30, at_once=at_once, cached=True
    )
    began = time.perf_counter()
    info = StepInfo(0, 0, False, texts.micro_batches, 1, decoding=Decoding(True))
    cluster.begin(info)
    cluster.pipeline.decode(texts)
    seconds = time.perf_counter() - began
    cluster.retrying(cluster.pipeline.abort)
    results = texts.results
    return results, sum(len(s.tokens) for r in results for s in r.samples) / seconds


def lead(connection: Connection, load: Load, *_: Any) -> None:
    """The coordinator's process: for each round the share of the bound and the speed-up."""
    raw, rounds, _leak = connection.recv()
    config = Config.from_dict(raw)
    frames, found = DEFAULT_MAX_FRAME_BYTES, []
    with Cluster(
        config, max_frame_bytes=frames, build=load.build, access=access(config, "local", None)
    ) as cluster:
        cluster.start()
        cluster.assemble(config)
        groups = [SampleRequest((k, 5, 6), SAMPLES, NEW) for k in range(GROUPS)]
        for _ in range(rounds + 1):
            slept_seconds(cluster)
            _results, speed = sampled(cluster, groups, at_once=2 * load.stages)
            seconds = GROUPS * SAMPLES * NEW / speed
            slept = max(forward for forward, _ in slept_seconds(cluster).values())
            _results, alone = sampled(cluster, [replace(groups[0], num_samples=1)], at_once=1)
            found.append((slept / seconds, speed / alone))
    connection.send(found[1:])


def through_sleeping_stages(rounds: int) -> dict[str, Any]:
    load = Answering.of(3, 1, [SECONDS], [0.0], 1 << 15)
    with open_network("loopback", 3) as network, Product(network, load, lead=lead) as product:
        found: Any = product.run(Engine("direct"), rounds, LIMIT_S)
    of_bound, speed_up = zip(*found, strict=True)
    return {
        "case": f"3 stages of {1e3 * SECONDS:g} ms, {GROUPS} groups of {SAMPLES}",
        "of_bound": round(statistics.median(of_bound), 3),
        "speed_up": round(statistics.median(speed_up), 2),
    }


def beside_generate(rounds: int) -> dict[str, Any]:
    """Both ways in turn, in this process, over the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA.settings()))
        model.train(False).save_pretrained(folder)
        whole = {"id": "local", "start": 0, "end": LLAMA.layers}
        machine = {"ip": "127.0.0.1", "device": "cpu", "num_threads": 1}
        config = Config.from_dict(
            {
                "coordinator": machine,
                "workers": [],
                "shard_plan": [whole],
                "model": {"name_or_path": str(Path(folder))},
                "training": {"output_dir": folder, "report_to": "none", "log_level": "ERROR"},
            }
        )
        request = SampleRequest(PROMPT, SAMPLES, NEW_OF_LLAMA, temperature=0.0)
        ids = torch.tensor([PROMPT] * SAMPLES)
        settings = {"max_new_tokens": NEW_OF_LLAMA, "do_sample": False, "eos_token_id": []}
        ratios, ours, theirs = [], [], []
        with Cluster(config, max_frame_bytes=1 << 30) as cluster:
            cluster.start()
            cluster.assemble(config)
            for _ in range(rounds + 1):
                [result], speed = sampled(cluster, [request], at_once=2)
                began = time.perf_counter()
                mask = torch.ones_like(ids)
                expected = model.generate(ids, attention_mask=mask, pad_token_id=0, **settings)
                seconds = time.perf_counter() - began
                tokens = expected[:, len(PROMPT) :].tolist()
                if [list(sample.tokens) for sample in result.samples] != tokens:
                    raise HeteroError("generate gives other tokens")
                ours.append(speed)
                theirs.append(SAMPLES * NEW_OF_LLAMA / seconds)
                ratios.append(speed / theirs[-1])
    return {
        "case": f"a Llama of {LLAMA.layers} layers, hidden {LLAMA.hidden_size}, {SAMPLES} texts",
        "tokens_per_s": round(statistics.median(ours[1:])),
        "generate_tokens_per_s": round(statistics.median(theirs[1:])),
        "of_generate": round(statistics.median(ratios[1:]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for measured in (through_sleeping_stages, beside_generate):
        cases.append(measured(options.rounds))
        print(json.dumps(cases[-1]), flush=True)
    if options.save:
        result = {"benchmark": "sampling", "rounds": options.rounds, "cases": cases}
        print(save("sampling", {**result, "environment": describe()}))


if __name__ == "__main__":
    run_program(main)
