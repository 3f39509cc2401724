"""The time of a token that three stages decode, beside what the stages take for it by themselves.

    python -m benchmarks.decoding --save

A Llama of 24 layers is cut into three stages: this process and two workers, and once more three
shards in this process alone, one after the other. Both put 128 tokens behind a prompt of 16, one
text at a time, with caches, in turn; the tokens must be the same. Prints one JSON object per size:
`token_ms` of the median round through the processes, `stages_ms` of the median round of the shards,
and `ratio`, the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe, save
from benchmarks.machines import run_program
from benchmarks.network import free_ports
from benchmarks.stages import Llama
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.devices import open_device
from hetero_framework.core.messages import Decoding
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import HeteroError
from hetero_framework.extras.talking.decoding import ShardCache
from hetero_framework.extras.talking.sampling import SampleRequest
from hetero_framework.extras.talking.text_generation import TextGeneration
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Shard, load_shard
from hetero_framework.models.cut.side import Bundle

CASES = {"hidden 256": Llama(24, 256), "hidden 512": Llama(24, 512)}
PROMPT, NEW = list(range(3, 19)), 128
GREEDY = SampleRequest(tuple(PROMPT), max_tokens=NEW, temperature=0.0)


def config_of(llama: Llama, folder: str) -> Config:
    ports, third = free_ports(3), llama.layers // 3
    machine = {"ip": "127.0.0.1", "device": "cpu", "num_threads": 1}
    entries = [{**machine, "port": port} for port in ports]
    cuts = [{"start": third * k, "end": third * (k + 1)} for k in range(3)]
    raw: dict[str, Any] = {
        "coordinator": entries[0],
        "workers": [{**entry, "id": k} for k, entry in enumerate(entries[1:], 1)],
        "shard_plan": [{"id": owner, **cuts[k]} for k, owner in enumerate(("local", 1, 2))],
        "model": {"from_config": llama.settings()},
        "training": {"output_dir": folder, "report_to": "none", "log_level": "ERROR"},
    }
    return Config.from_dict(raw)


def through_processes(cluster: Cluster) -> tuple[list[int], float]:
    """The tokens, and the seconds of each but the first, for which the stages see the prompt."""
    times: list[float] = []
    texts = TextGeneration(
        [GREEDY],
        max_positions=None,
        ends=(),
        vocabulary=1 << 31,
        at_once=1,
        cached=True,
        take_token=lambda *token: times.append(time.perf_counter()),
    )
    cluster.begin(StepInfo(0, 0, False, texts.micro_batches, 1, decoding=Decoding(True)))
    cluster.pipeline.decode(texts)
    cluster.retrying(cluster.pipeline.abort)
    return list(texts.results[0].samples[0].tokens), (times[-1] - times[0]) / (NEW - 1)


def by_themselves(shards: list[Shard]) -> tuple[list[int], float]:
    """As `through_processes`, of shards in this process."""
    caches, tokens, first = (
        [ShardCache(shard.config, shard.range) for shard in shards],
        list(PROMPT),
        0,
    )
    seconds = 0.0
    with torch.no_grad():
        for number in range(NEW):
            inputs = {
                "input_ids": torch.tensor([tokens[first:]]),
                "positions": torch.arange(first, len(tokens))[None],
            }
            received: Bundle = ()
            first = len(tokens)
            began = time.perf_counter()
            for shard, cache in zip(shards[:-1], caches, strict=False):
                received = shard.forward(inputs, received, cache)
            logits = shards[-1].next_logits(inputs, received, caches[-1])
            seconds += time.perf_counter() - began if number else 0.0
            tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :], seconds / (NEW - 1)


def measure(llama: Llama, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(llama, folder)
        assert config.model is not None
        cpu, seed = open_device("cpu"), config.training.seed
        shards = [
            load_shard(config.model, Path(folder), ShardRange.of(spec), cpu, seed=seed)
            for spec in config.plan.stages
        ]
        for shard in shards:
            shard.train(False)
        pipeline, alone = [], []
        with Cluster(config, max_frame_bytes=1 << 30) as cluster:
            cluster.start()
            cluster.assemble(config)
            for _ in range(rounds + 1):
                tokens, token_s = through_processes(cluster)
                expected, stages_s = by_themselves(shards)
                if tokens != expected:
                    raise HeteroError("the processes give other tokens than the shards alone")
                pipeline.append(token_s)
                alone.append(stages_s)
    ratios = [a / b for a, b in zip(pipeline[1:], alone[1:], strict=True)]
    return {
        "token_ms": round(1e3 * statistics.median(pipeline[1:]), 2),
        "stages_ms": round(1e3 * statistics.median(alone[1:]), 2),
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for name, llama in CASES.items():
        cases.append({"case": name, **measure(llama, options.rounds)})
        print(json.dumps(cases[-1]), flush=True)
    if options.save:
        result = {"benchmark": "decoding", "rounds": options.rounds, "cases": cases}
        print(save("decoding", {**result, "environment": describe()}))


if __name__ == "__main__":
    run_program(main)
