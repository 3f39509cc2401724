"""Islands that sum their gradients: one training, whatever the islands' plans."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_framework.config import Config, TrainingConfig
from hetero_framework.core import timeouts
from hetero_framework.core.messages import Gradients
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import GradientPart, StatePart
from hetero_framework.errors import ConfigError, PeerAwayError, ProtocolError
from hetero_framework.extras.islands import lighthouse
from hetero_framework.extras.islands import opening as islands
from hetero_framework.extras.islands.group import STATE, Group, SessionStart
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient
from hetero_framework.extras.islands.outer import OuterFragment
from hetero_framework.extras.islands.outer_rounds import OuterRounds
from hetero_framework.extras.islands.summed_steps import SummedGradients
from hetero_framework.trainer import skipped_step
from hetero_framework.trainer.coordinator import Coordinator, train
from tests.extras.islands.helpers import StandIn, outcomes, serving, train_islands
from tests.installed import needs
from tests.integration.test_parity import LORA, assert_same, weights
from tests.integration.test_resume import evals
from tests.pools import Notes, Pool, read_metrics
from tests.samples import DEVICE, plan_of, save_llama, save_texts

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

STEPS = 4


@pytest.fixture(autouse=True)
def quorums(nothing_left, monkeypatch, verdicts):
    """All islands come to a lighthouse without torchft."""
    monkeypatch.setattr(lighthouse, "SETTLE_S", 0.0)
    monkeypatch.setattr(timeouts, "LIGHTHOUSE_LINK", LinkDeadlines())
    with serving(StandIn()) as made:
        address = ("127.0.0.1", made.port)
        monkeypatch.setattr(
            islands, "LighthouseClient", lambda _, *more: LighthouseClient(address, *more)
        )
        assert isinstance(made._quorums, StandIn)
        yield made._quorums


@pytest.fixture
def settings(llama, texts):
    return {"model": {"name_or_path": str(llama)}, "data": {"train": str(texts), "max_length": 64}}


def island(
    pool: Pool,
    output: Path,
    cuts: list[int],
    settings: dict[str, Any],
    *,
    rows: int = 2,
    accumulation: int = 6,
    section: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    first_worker: int = 1,
) -> dict[str, Any]:
    own = {
        **{"verify_architecture": False, "probe_longest_batch": False, "max_steps": STEPS},
        **{"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation},
        **(training or {}),
    }
    owners = ["local", *range(first_worker, first_worker + len(cuts))]
    plan = plan_of(*zip(owners, [*cuts, 6], strict=True))
    raw = pool.config(output, cuts, training=own, shard_plan=plan, **settings)
    if section is not None:
        raw["island"] = {"lighthouse": "127.0.0.1:29510", "min_islands": 2, **section}
    return raw


def train_pair(
    pool: Pool, output: Path, cuts: Sequence[list[int]], settings: dict[str, Any], **own: Any
) -> None:
    """Islands a and b, each cut before these layers, into the folders of their names."""
    section = own.pop("section", {})
    train_islands(
        {
            name: island(
                *(pool, output / name, own_cuts, settings),
                section={"name": name, **section},
                first_worker=first,
                **own,
            )
            for name, own_cuts, first in (("a", cuts[0], 1), ("b", cuts[1], 3))
        }
    )


def lines(output: Path, *keys: str) -> list[dict[str, Any]]:
    text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    return [{key: step[key] for key in keys} for step in map(json.loads, text.splitlines())]


def test_the_best_model_is_the_result_of_each_island(pool, settings, tmp_path):
    """The first evaluation is the best one, since steps are too large."""
    settings["data"]["eval"] = settings["data"]["train"]
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    how = {**every, "load_best_model_at_end": True, "max_steps": 3}
    how |= {"learning_rate": 3.0, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    train_pair(pool, tmp_path, [[], []], settings, training=how)
    losses = [loss for _, loss, _ in evals(tmp_path / "a")]
    assert min(losses) < losses[-1]
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_two_islands_of_any_plans_are_one_training(pool, settings, tmp_path, monkeypatch):
    """Uneven micro-batches of uneven lengths: 9 samples of a step by fours, 3 by twos. Gradients
    leave the coordinators' stages one by one, and workers' while they compute."""
    monkeypatch.setattr("hetero_framework.engine.stage.EARLY_PART_BYTES", 1)
    wide = save_llama(tmp_path / "model", hidden_size=96, intermediate_size=192)
    settings = {**settings, "model": {"name_or_path": str(wide)}}
    came: dict[int, list[bool]] = {}
    take = RemoteHost._take_gradients

    def note(host: RemoteHost, message: Any, body: Gradients) -> None:
        came.setdefault(body.stage, []).append(body.last)
        take(host, message, body)

    monkeypatch.setattr(RemoteHost, "_take_gradients", note)
    fours: dict[str, Any] = {"rows": 4, "accumulation": 3}
    whole = island(pool, tmp_path / "whole", [], settings, **fours)
    train(Config.from_dict(whole), progress=Notes())
    for name, a_cuts, b_cuts in (("one", [], []), ("cut", [2, 4], [3])):
        folder, most = tmp_path / name, {**fours, "section": {"name": "a", "share": 3}}
        least: dict[str, Any] = {"section": {"name": "b", "share": 1}, "first_worker": 3}
        train_islands(
            {
                "a": island(pool, folder / "a", a_cuts, settings, **most),
                "b": island(pool, folder / "b", b_cuts, settings, **least),
            }
        )
    assert all(lasts.count(False) >= lasts.count(True) for lasts in came.values()), came
    for name in ("one", "cut"):
        a, b = (tmp_path / name / key for key in "ab")
        assert lines(a, "step", "loss", "grad_norm") == lines(b, "step", "loss", "grad_norm")
        assert_same(weights(a), weights(b))
    assert lines(tmp_path / "one" / "a", "loss", "grad_norm") == lines(
        tmp_path / "cut" / "a", "loss", "grad_norm"
    )
    assert_same(weights(tmp_path / "one" / "a"), weights(tmp_path / "cut" / "a"))
    ours = lines(tmp_path / "cut" / "a", "loss", "island")
    theirs = lines(tmp_path / "whole", "loss")
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert_waits(*(lines(tmp_path / "cut" / key, "step_seconds", "island") for key in "ab"))
    assert [one["island"]["samples"] for one in ours[:2]] == [{"a": 9, "b": 3}, {"a": 7, "b": 2}]
    a, whole_weights = weights(tmp_path / "cut" / "a"), weights(tmp_path / "whole")
    for key, tensor in whole_weights.items():
        torch.testing.assert_close(a[key], tensor, rtol=1e-3, atol=1e-5)


@needs("host_memory")
@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU and the machine have one memory")
@pytest.mark.parametrize("section", [{}, {"sync_steps": 2}], ids=["every step", "rounds"])
def test_trained_layers_of_islands_may_visit(section, pool, settings, tmp_path, monkeypatch):
    # The islands are threads here, which share the random numbers that this check draws.
    check = "hetero_framework.extras.host_memory.residence.admit_streaming"
    monkeypatch.setattr(check, lambda config: None)
    for offload in (0, 6):
        raws = {}
        for name in "ab":
            folder, own = tmp_path / f"{offload}" / name, {"name": name, **section}
            raws[name] = island(pool, folder, [], settings, section=own)
            raws[name]["shard_plan"][0]["offload"] = offload
        train_islands(raws)
    for name in "ab":
        stayed, visited = tmp_path / "0" / name, tmp_path / "6" / name
        assert read_metrics(visited) == read_metrics(stayed)
        assert_same(weights(visited), weights(stayed))


@pytest.mark.long
@needs("streams")
@pytest.mark.parametrize(
    "section",
    [{}, {"sync_steps": 2}],
    ids=["every step", "rounds"],
)
def test_islands_deal_the_samples_of_a_stream(section, pool, settings, tmp_path):
    """A stream in order has the samples of a file in order."""
    texts = save_texts(tmp_path / "texts.jsonl", 60)
    training = {"train_sampling_strategy": "sequential"}
    for name in ("file", "stream"):
        data = {"train": str(texts), "max_length": 64, "streaming": name == "stream"}
        own = {"section": section, "training": training}
        train_pair(pool, tmp_path / name, ([], []), {**settings, "data": data}, **own)
    for key in "ab":
        file, stream = tmp_path / "file" / key, tmp_path / "stream" / key
        assert lines(stream, "step", "loss") == lines(file, "step", "loss")
        assert_same(weights(stream), weights(file))


def assert_waits(*islands: list[dict[str, Any]]) -> None:
    """In each step everybody waits for the others or the network."""
    for step in chain(*islands):
        assert 0 < step["island"]["waited_s"] < step["step_seconds"]


@pytest.mark.long
def test_islands_sum_a_weight_of_several_stages_place_by_place(pool, settings, tmp_path):
    model = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    tied = {**settings, "model": {"name_or_path": str(model)}}
    for name, cuts in (("one", ([], [])), ("cut", ([2, 4], [3]))):
        train_pair(pool, tmp_path / name, cuts, tied, section={"share": 1}, accumulation=3)
        assert_same(weights(tmp_path / name / "a"), weights(tmp_path / name / "b"))
    found = [lines(tmp_path / name / "a", "loss", "grad_norm") for name in ("one", "cut")]
    assert found[0] == found[1]
    assert_same(weights(tmp_path / "one" / "a"), weights(tmp_path / "cut" / "a"))


def test_a_single_island_trains_as_without_islands(pool, settings, tmp_path):
    own = {**settings, "adapter": {**LORA, "lora_dropout": 0.1}}
    train(Config.from_dict(island(pool, tmp_path / "whole", [], own)), progress=Notes())
    section = {"name": "a", "min_islands": 1}
    train_islands({"a": island(pool, tmp_path / "a", [3], own, section=section)})
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    assert lines(tmp_path / "a", *keys) == lines(tmp_path / "whole", *keys)
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "whole"))


def test_a_step_that_is_not_finite_on_one_island_is_told_with_its_own_samples(
    pool, settings, tmp_path, monkeypatch
):
    train_step, outcome, here = Coordinator.train_step, Stage._outcome, threading.local()
    told: dict[str, Any] = {}

    def step(run: Coordinator) -> Any:
        here.name = run._config.output_dir.name
        return train_step(run)

    def infinite(stage: Stage, micro_batch: int, *args: Any) -> Any:
        value, at = outcome(stage, micro_batch, *args), (stage._info.step, micro_batch)
        is_hit = (here.name, at) == ("b", (1, 1))
        return replace(value, loss=value.loss * math.inf) if is_hit else value

    def note(state: Any, total: int, training: Any, where: str) -> None:
        told[here.name] = where

    monkeypatch.setattr(Coordinator, "train_step", step)
    monkeypatch.setattr(Stage, "_outcome", infinite)
    monkeypatch.setattr(skipped_step, "check_not_too_many", note)
    order = {"train_sampling_strategy": "sequential", "max_steps": 2}
    train_pair(pool, tmp_path, ([], []), settings, accumulation=4, training=order)
    [step_2] = [line for line in lines(tmp_path / "b", "step", "island") if line["step"] == 2]
    assert step_2["island"]["sample_ids"] == {"a": [8, 9, 10, 11], "b": [12, 13, 14, 15]}
    assert told["a"] == "non-finite losses or gradients of island b"
    assert told["b"].startswith("non-finite values in micro-batch 1, ")
    assert told["b"].endswith("samples 14, 15")


def test_a_step_that_a_rule_skips_on_one_island_is_skipped_on_all(
    pool, settings, tmp_path, monkeypatch
):
    def rule(state: Any, norm: float, training: TrainingConfig) -> str | None:
        is_b = Path(training.output_dir).name == "b"
        return "island b's rule" if is_b and state.step == 1 else None

    monkeypatch.setattr(skipped_step, "RULES", [rule])
    training = {"max_steps": 3, "max_skipped_steps": 0}
    train_pair(pool, tmp_path, ([], []), settings, training=training)
    for name in "ab":
        text = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8")
        reasons = [json.loads(line).get("reason") for line in text.splitlines()]
        assert reasons == [None, "island b's rule", None]
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.islands
def test_an_invalid_island_is_told_why_and_the_others_go_on(pool, settings, tmp_path, monkeypatch):
    right = SummedGradients.give

    def give(self: SummedGradients, found: GradientPart) -> None:
        if self._session.me == "b" and self._number == STATE + 2:
            tensors = {name: t.flatten()[:1] for name, t in found.part.tensors.items()}
            found = replace(found, part=StatePart(tensors, last=found.part.last))
        right(self, found)

    monkeypatch.setattr(SummedGradients, "give", give)
    may_begin = Group._may_begin

    def all_begin(self: Group, joined: SessionStart) -> bool:
        started = any(position.step for position in joined.positions.values())
        return may_begin(self, joined) and (started or len(joined.session.members) == 3)

    monkeypatch.setattr(Group, "_may_begin", all_begin)
    found = outcomes(
        {
            name: island(pool, tmp_path / name, [], settings, section={"name": name, "share": 1})
            for name in "abc"
        }
    )
    assert isinstance(found["b"], ProtocolError)
    assert "island b sends a gradient of" in str(found["b"])  # by the first to notice
    train(Config.from_dict(island(pool, tmp_path / "whole", [], settings)), progress=Notes())
    losses = [line["loss"] for line in lines(tmp_path / "whole", "loss")]
    for name in "ac":
        own = lines(tmp_path / name, "loss", "island")
        assert [line["loss"] for line in own] == pytest.approx(losses, rel=1e-5)
        assert [len(line["island"]["members"]) for line in own] == [3, 2, 2, 2]
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "c"))


DIFFERENT: dict[str, dict[str, Any]] = {
    "weights of the model": {"model": "other"},
    "model.dtype": {"model": {"dtype": "bfloat16"}},
    "adapter.r": {"adapter": {**LORA, "r": 3}},
    "adapter": {"adapter": None},
    "data": {"data": "other"},
    "data_seed": {"training": {"seed": 1}},
    "training.learning_rate": {"training": {"learning_rate": 0.5}},
    "samples of a step": {"training": {"gradient_accumulation_steps": 3}},
    "island.sync_steps": {"island": {"sync_steps": 2}},
    "island.warmup_steps": {"island": {"warmup_steps": 2}},
    "island.compression": {"island": {"compression": "int8"}},
    "kind of island.share": {"island": {"share": 2}},
}


@pytest.mark.islands
@pytest.mark.parametrize("key", DIFFERENT)
def test_an_island_with_other_settings_is_told_which(pool, settings, tmp_path, quorums, key):
    """It ends, and the other one, which must not train alone, when it has waited. Where the same
    things lie on another path, that is no difference."""
    quorums.least = 2
    same = shutil.copytree(settings["model"]["name_or_path"], tmp_path / "copy")
    one = island(pool, tmp_path / "a", [], {**settings, "adapter": LORA})
    other = island(pool, tmp_path / "b", [], {**settings, "adapter": LORA})
    other["model"] = {**other["model"], "name_or_path": str(same)}
    for name, raw in (("a", one), ("b", other)):
        raw["island"] = {"name": name, "lighthouse": "127.0.0.1:29510", "min_islands": 2}
        raw["island"]["wait_s"] = 0.1
    for section, change in DIFFERENT[key].items():
        if section == "model" and change == "other":
            save_llama(tmp_path / "other", seed=1)
            other["model"]["name_or_path"] = str(tmp_path / "other")
        elif section == "data":
            save_texts(tmp_path / "other.jsonl", 21, seed=1)
            other["data"] = {**other["data"], "train": str(tmp_path / "other.jsonl")}
        elif change is None:
            del other[section]
        else:
            other[section] = {**other[section], **change}
    found = outcomes({"a": one, "b": other})
    assert isinstance(found["b"], ConfigError), found
    assert f"island b does not train what island a does: {key} is " in str(found["b"])
    assert isinstance(found["a"], PeerAwayError), found
    assert "of the 2 islands that this run wants there were 1 island for 0 s: a" in str(found["a"])
    for name in "ab":
        assert not (tmp_path / name / "metrics.jsonl").exists() or not lines(
            tmp_path / name, "step"
        )


# -- rounds ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_single_island_that_averages_trains_as_without_islands(pool, settings, tmp_path):
    """LocalSGD of one island, and DiLoCo at outer rate 1 without momentum."""
    own = {**settings, "adapter": LORA}
    train(Config.from_dict(island(pool, tmp_path / "whole", [], own)), progress=Notes())
    plain = {"method": "diloco", "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    for name, section in (("sgd", {"method": "local_sgd"}), ("diloco", {**plain, "fragments": 2})):
        section = {"name": "a", "min_islands": 1, "sync_steps": 2, **section}
        train_islands({"a": island(pool, tmp_path / name, [3], own, section=section)})
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
        assert lines(tmp_path / name, *keys) == lines(tmp_path / "whole", *keys)
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))


ROUNDS = {"sync_steps": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    "section",
    [
        {},
        pytest.param(
            {"sync_steps": 4, "fragments": 2, "delay_steps": 1, "mixing": 0.5},
            marks=pytest.mark.islands,
        ),
        pytest.param(
            {"method": "local_sgd", "compression": "int8", "warmup_steps": 3},
            marks=pytest.mark.long,
        ),
    ],
    ids=["plain", "streaming", "warmup"],
)
def test_rounds_do_not_depend_on_the_islands_plans(pool, settings, tmp_path, section):
    own = {"section": {**ROUNDS, **section}, "training": {"max_steps": 8}}
    train_pair(pool, tmp_path / "one", ([], []), settings, **own)
    train_pair(pool, tmp_path / "cut", ([2, 4], [3]), settings, **own)
    for name in ("a", "b"):
        one, cut = tmp_path / "one" / name, tmp_path / "cut" / name
        keys = ("step", "loss", "grad_norm", "learning_rate")
        assert lines(one, *keys) == lines(cut, *keys)
        assert_same(weights(one), weights(cut))
    a, b = (tmp_path / "cut" / name for name in "ab")
    assert_same(weights(a), weights(b))
    hashes = [
        [line["island"]["hash"] for line in lines(at, "island") if "hash" in line["island"]]
        for at in (a, b)
    ]
    synced = [line["island"] for line in lines(a, "island") if "hash" in line["island"]]
    assert all(one["waited_s"] >= 0 for one in synced)
    common = min(map(len, hashes))  # who has no step in a round has no line for its hash
    assert hashes[0][:common] == hashes[1][:common]
    assert common >= 1
    first = section.get("warmup_steps", 0)
    summed = [line["island"]["samples"] for line in lines(a, "island")[:first]]
    assert all(sum(samples.values()) in (12, 9) for samples in summed)
    steps = [line["island"]["data_step"] for at in (a, b) for line in lines(at, "island")[first:]]
    assert sorted(steps) == list(range(first, 8))  # each once


@pytest.mark.islands
def test_an_island_with_other_weights_ends_and_its_steps_are_reassigned(
    pool, settings, tmp_path, quorums, monkeypatch
):
    quorums.least = 2
    right = OuterRounds._agreed

    def agreed(self: OuterRounds, after: OuterFragment) -> Any:
        if self._island.name == "b" and self._syncs == 1:
            after.weights = {name: tensor + 1 for name, tensor in after.weights.items()}
        return right(self, after)

    monkeypatch.setattr(OuterRounds, "_agreed", agreed)
    found = outcomes(
        {
            name: island(
                *(pool, tmp_path / name, [], settings),
                section={**ROUNDS, "name": name, "min_islands": 1},
                training={"max_steps": 12},
            )
            for name in "ab"
        }
    )
    assert isinstance(found["b"], ProtocolError), found
    assert "island a does not take what this island says: it has come to other" in str(found["b"])
    told = [line["island"] for line in lines(tmp_path / "a", "island")]
    counted = sorted(tuple(part) for line in told for part in line.get("counted", []))
    assert [k for first, after in counted for k in range(first, after)] == list(range(12))
    assert told[-1]["members"] == ["a"]
