from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError, DataError
from hetero_framework.extras.chains.tensor_data import OwnExamples, load_own_data, shown_forms
from tests.samples import plan_of

ISLAND = {"name": "a", "lighthouse": "127.0.0.1:29510"}
PAIR = (torch.ones(2, 3), 1)


def examples_of(monkeypatch: pytest.MonkeyPatch, found: Any, seed: int = 0) -> OwnExamples:
    monkeypatch.setattr(control, "_modules", [SimpleNamespace(mine=found)])
    return OwnExamples("train", "mine", seed)


def test_examples_are_put_upon_each_other_by_name(monkeypatch):
    pair = ({"a": torch.ones(2), "b": 3}, {"c": 0.5})
    own = examples_of(monkeypatch, lambda: [pair, pair])
    batch = own.collate([0, 1])
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input.a": ((2, 2), torch.float32),
        "input.b": ((2,), torch.int64),
        "target.c": ((2,), torch.float32),
    }
    assert own.forms["input.a"] == ((2,), "float32")
    assert shown_forms(own.forms) == (
        "input.a 2 of float32, input.b a number of int64, target.c a number of float32"
    )


def test_what_an_example_draws_is_its_own(monkeypatch):
    """A step can be computed again, and the process draws on as if nothing had been drawn."""
    data = [(example, 0) for example in range(3)]
    own = examples_of(monkeypatch, Drawing(data))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, again = own.collate([2, 0]), own.collate([0])
    assert torch.equal(first["input"][1], again["input"][0])
    assert not torch.equal(own.collate([0], epoch=1)["input"], again["input"])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    other = examples_of(monkeypatch, Drawing(data), seed=1)
    assert not torch.equal(other.collate([0])["input"], again["input"])


class Drawing:
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        return torch.tensor(drawn), self.data[index][1]


WRONG: dict[str, tuple[Any, str]] = {
    "absent": (None, "no imported file has a data set of that name"),
    "no_length": (iter([PAIR]), "no imported file has a data set"),
    "empty": ([], "is empty"),
    "no_pair": ([torch.ones(3)], "example 0 is no pair of input and target but a Tensor"),
    "shapes": ([PAIR, (torch.ones(2), 1)], "examples 0, 1 do not make a micro-batch"),
    "text": ([("a", 1)], "input is a list, no tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_unusable_examples_are_refused(case, monkeypatch):
    found, message = WRONG[case]
    monkeypatch.setattr(control, "_modules", [])

    def collate() -> None:
        own = examples_of(monkeypatch, found) if found is not None else OwnExamples("train", "x", 0)
        own.collate(range(len(own)))

    with pytest.raises(DataError, match=message):
        collate()


def test_the_fingerprint_is_that_of_the_examples(monkeypatch):
    one = examples_of(monkeypatch, [PAIR] * 3).fingerprint
    assert examples_of(monkeypatch, [PAIR] * 3).fingerprint == one
    others: list[Any] = [[PAIR] * 4, [PAIR, PAIR, (torch.zeros(2, 3), 1)]]
    assert all(examples_of(monkeypatch, other).fingerprint != one for other in others)


def test_steps_take_the_epochs_order(monkeypatch):
    examples_of(monkeypatch, Drawing([(0, k) for k in range(8)]))
    training = {"objective": "sequential", "per_device_train_batch_size": 2}
    sections = {"model": {"chain": "it"}, "data": {"train": "mine", "eval": "mine"}}
    machine, plan = {"ip": "127.0.0.1", "port": 1}, plan_of(("local", 1))
    raw = {"coordinator": machine, "workers": [], "shard_plan": plan, **sections}
    data = load_own_data(Config.from_dict({**raw, "training": training}))
    assert (data.steps_per_epoch, data.total_steps, data.row_tokens) == (4, 12, 1)
    targets = [int(t) for step in range(4) for t in data.step_batches(step)[0]["target"]]
    assert sorted(targets) == list(range(8)) != targets
    assert [len(batch["input"]) for batch in data.eval_batches()] == [8]
    assert torch.equal(data.step_batches(5)[0]["input"], data.step_batches(5)[0]["input"])
    with pytest.raises(ConfigError, match='a chain is trained with "sequential", and nothing else'):
        Config.from_dict(raw)
    with pytest.raises(ConfigError, match="islands share weights, and neither running means"):
        Config.from_dict({**raw, "training": training, "island": ISLAND})
    with pytest.raises(ConfigError, match="is for models of texts; take it out"):
        Config.from_dict({**raw, "training": training, "adapter": {}})
    for model, message in (
        ({"chain": "it", "name_or_path": "m"}, "name_or_path, from_config or chain, exactly one"),
        ({"chain": "it", "quantization": "nf4"}, "quantization needs stored weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config.from_dict({**raw, "training": training, "model": model})
