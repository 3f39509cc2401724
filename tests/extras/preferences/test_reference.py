"""Numbers of a reference are used again only where the same ones would be computed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core import cache
from hetero_framework.data.examples import Examples
from hetero_framework.engine.stage_api import Outcome
from hetero_framework.errors import NumericError, ProtocolError
from hetero_framework.extras.preferences.pair_objective import LOGPS
from hetero_framework.extras.preferences.pairs import AnswerRows
from hetero_framework.extras.preferences.reference import Reference
from hetero_framework.trainer.setup import Prepared

BASE: dict[str, Any] = {
    "coordinator": {"ip": "127.0.0.1", "device": "cpu"},
    "workers": [{"id": 1, "ip": "127.0.0.1", "port": 9999}],
    "shard_plan": [{"id": "local", "start": 0, "end": 2}, {"id": 1, "start": 2, "end": 4}],
    "model": {"name_or_path": "m", "quantization": "nf4"},
    "adapter": {"r": 4},
    "training": {"objective": "dpo"},
}
LABELS = {"local": "card", 1: "card"}


class Asked(Reference):
    """A reference that counts how often it is asked; every answer is 0."""

    def __init__(self, changes: dict[str, Any], labels: Any, place: Any, origin: Any) -> None:
        sections = {**BASE, **{k: _merged(k, v) for k, v in changes.items()}}
        sections["training"] = {**sections["training"], "output_dir": str(place)}
        lora = SimpleNamespace(bias="none", init_lora_weights=True)
        plan = SimpleNamespace(weights=origin, rewrites_base=False, lora_config=lora, origin=origin)
        prepared = SimpleNamespace(config=Config.from_dict(sections), adapter_plan=plan)
        super().__init__(cast(Prepared, prepared), labels)
        self.count = 0

    def _asked(self, cluster: Any, data: Any, rows: AnswerRows, name: str) -> list[list[float]]:
        self.count += 1
        return [[0.0] * rows.each for _ in range(len(rows))]


def _merged(name: str, value: Any) -> Any:
    return {**BASE.get(name, {}), **value} if isinstance(value, dict) else value


@pytest.fixture
def ask(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    rows = AnswerRows(
        Examples(np.arange(8, dtype=np.int32), np.ones(8, bool), np.array([0, 2, 4, 6, 8]))
    )
    cluster = cast(Cluster, SimpleNamespace(fingerprint="weights"))

    def asked(name: str, step: int = 0, labels: Any = LABELS, origin: Any = None, **changes: Any):
        reference = Asked(changes, labels, tmp_path / name, origin)
        data = SimpleNamespace(examples=rows, eval_sets={})
        reference.prepare(cluster, cast(Any, data), step)
        return reference.count

    return asked


WAYS: dict[str, dict[str, Any]] = {
    "the seed": {"training": {"seed": 1}},
    "another objective": {"training": {"objective": "cpo"}},
    "a machine's quantization": {"coordinator": {"quantization": "none"}},
    "the codec": {"wire": {"activations": "int8"}},
    "compiled": {"training": {"torch_compile": True}},
    "bfloat16": {"training": {"bf16": True}},
    "attention": {"model": {"attn_implementation": "eager"}},
    "rows beside each other": {"training": {"per_device_train_batch_size": 2}},
    "what is counted": {"training": {"ld_alpha": 0.5}},
    "another device": {"labels": {"local": "card", 1: "other"}},
    "an adapter to start from": {"origin": "digest"},
}


@pytest.mark.parametrize("way", WAYS)
def test_another_way_to_compute_asks_again(way, ask):
    assert ask("first") == 1
    assert ask("again") == 0
    assert ask("other", **WAYS[way]) == 1


def test_what_only_the_training_depends_on_does_not_ask_again(ask):
    ask("first")
    cut = [{"id": "local", "start": 0, "end": 3}, {"id": 1, "start": 3, "end": 4}]
    assert ask("plan", shard_plan=cut) == 0
    coded = {"wire": {"activations": "int8"}}  # rounds at each cut
    assert [ask("coded", **coded), ask("elsewhere", shard_plan=cut, **coded)] == [1, 1]
    assert ask("rate", training={"learning_rate": 1.0, "beta": 0.5, "output_dir": "x"}) == 0


def test_a_run_that_goes_on_elsewhere_keeps_what_it_was_told(ask, monkeypatch):
    """Also on other machines, and without the cache."""
    ask("run", origin="digest")
    monkeypatch.setenv("HETERO_CACHE", "")
    assert cache.cache_directory() is None
    moved = {"labels": {"local": "card", 1: "other"}, "training": {"torch_compile": True}}
    assert ask("run", step=1, origin="digest", **moved) == 0
    assert ask("run", step=0, origin="digest", **moved) == 1


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("second", "error", "rows"),
    [
        (torch.tensor([-1.0, NAN, -1.0, -1.0]), NumericError, "8"),
        (torch.tensor([-INF, -1.0, INF, NAN]), NumericError, "3, 8"),
        (torch.tensor([-1.0, -1.0, -1.0, 1e39], dtype=torch.float64), NumericError, "8"),
        (torch.zeros(3), ProtocolError, "3, 8"),
        (torch.zeros(6), ProtocolError, "3, 8"),
        (torch.zeros(0), ProtocolError, "3, 8"),
        (torch.zeros(2, 2), ProtocolError, "3, 8"),
        (torch.zeros(4, dtype=torch.int64), ProtocolError, "3, 8"),
        (torch.zeros(4, dtype=torch.bool), ProtocolError, "3, 8"),
        (None, ProtocolError, "3, 8"),
    ],
)
@pytest.mark.parametrize("precomputed", [True, False])
def test_numbers_that_cannot_be_are_refused_with_their_rows(
    second, error, rows, precomputed, tmp_path, monkeypatch
):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    reference = Asked(
        {"training": {"precompute_ref_log_probs": precomputed}}, LABELS, tmp_path, None
    )
    named = [{LOGPS: torch.zeros(4)}, {} if second is None else {LOGPS: second}]
    pipeline = SimpleNamespace(
        outcomes=[Outcome(0.0, of_one) for of_one in named],
        judging_outcomes=nullcontext,
        run=lambda batches: None,
    )
    cluster = SimpleNamespace(pipeline=pipeline, run=lambda info, batches: None)
    numbers = [np.array([0, 5]), np.array([3, 8])]
    with pytest.raises(error, match=rf"these examples of eval b, counted from 0: {rows}(\n|$)"):
        reference._pass(cast(Any, cluster), [{}, {}], numbers, "eval b")
    assert not list(tmp_path.rglob("*.json"))
