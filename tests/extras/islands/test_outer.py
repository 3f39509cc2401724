from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from hetero_framework.errors import CheckpointError, ConfigError
from hetero_framework.extras.islands.outer import OuterFragment, cut, schedule, weighted_mean
from hetero_framework.extras.islands.settings import IslandConfig

TORCHFT = json.loads(
    (Path(__file__).parents[2] / "golden" / "torchft_diloco.json").read_text(encoding="utf-8")
)
LAYER = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
MODEL = {
    "model.embed_tokens.weight": 70,
    **{f"model.layers.{layer}.{part}": 10 for layer in range(4) for part in LAYER},
    "model.norm.weight": 1,
}
Change = Callable[[int, int, int], Tensor]
"""What an inner step adds to the weights: of (island, step, fragment)."""


def settings(**given: Any) -> IslandConfig:
    return IslandConfig.model_validate({"name": "a", "lighthouse": "h:1", "sync_steps": 6, **given})


class Island:
    """An island without a model: each fragment is one tensor, "w"."""

    def __init__(self, start: Sequence[Tensor], config: IslandConfig) -> None:
        self.local = [tensor.clone() for tensor in start]
        self.outer = [OuterFragment({"w": tensor}, config) for tensor in start]
        self.history: list[Any] = []
        self.agreed = [self.all_agreed()]

    def all_agreed(self) -> list[Any]:
        return [outer.weights["w"].flatten().tolist() for outer in self.outer]

    def take(self, member: Island) -> None:
        """What an island gets that joins or returns."""
        self.local = [tensor.clone() for tensor in member.local]
        for mine, theirs in zip(self.outer, member.outer, strict=True):
            mine.load_state_dict(load(save(theirs.state_dict())))


class Group:
    """Islands that train together; `returning` ones take the first one's state before they send."""

    def __init__(self, islands: list[Island], config: IslandConfig, change: Change) -> None:
        self.islands, self.config, self.change = islands, config, change
        self.returning: list[Island] = []
        self._sent: list[tuple[int, dict[str, Tensor]]] = []

    def step(self, number: int) -> None:
        config, done = self.config, number % self.config.sync_steps + 1
        for i, one in enumerate(self.islands):
            one.local = [w + self.change(i, number, f) for f, w in enumerate(one.local)]
        for sync in schedule(config.sync_steps, config.fragments, config.delay_steps):
            if sync.sent_after == done:
                self._send(sync.fragment)
            if sync.applied_after == done:
                self._apply(sync.fragment)
        for one in self.islands:
            one.history.append([tensor.flatten().tolist() for tensor in one.local])

    def _send(self, f: int) -> None:
        for one in self.returning:
            one.take(self.islands[0])
        self.returning = []
        self._sent = [(1, one.outer[f].change({"w": one.local[f]})) for one in self.islands]

    def _apply(self, f: int) -> None:
        mean = weighted_mean(self._sent)
        for one in self.islands:
            one.outer[f].step(mean)
            one.local[f] = one.outer[f].mixed({"w": one.local[f]})["w"]
            one.agreed.append(one.all_agreed())


# -- torchft's numbers ----------------------------------------------------------------------------

REGRESSION: dict[str, Any] = {"fragments": 2, "outer_learning_rate": 2.0, "outer_momentum": 0.0}


def by_two(island: int, step: int, fragment: int) -> Tensor:
    return torch.tensor([-2.0])


def check_history(one: Island, weights: list[list[float]], agreed: list[list[float]]) -> None:
    """Of numbers that float32 has exactly. torchft's weights are those before each step."""
    assert one.history[: len(weights) - 1] == [[[value] for value in row] for row in weights[1:]]
    assert one.agreed[: len(agreed)] == [[[value] for value in row] for row in agreed]


@pytest.mark.parametrize("case", TORCHFT["regression"], ids=lambda c: f"{list(c.values())[:2]}")
def test_fragments_delay_and_mixing_are_those_of_torchfts_regression_test(case):
    config = settings(**REGRESSION, delay_steps=case["delay_steps"], mixing=case["mixing"])
    group = Group([Island([torch.ones(1)] * 2, config) for _ in range(2)], config, by_two)
    for step in range(18):
        group.step(step)
    for one in group.islands:
        check_history(one, case["weights"][0], case["agreed"][0])


def test_an_island_that_died_goes_on_from_a_members_state_as_in_torchfts_test():
    """The second dies after two synchronisations, and comes back with the weights of the start: its
    first three steps do not count."""
    case, config = TORCHFT["failure"], settings(**REGRESSION)
    group = Group([Island([torch.ones(1)] * 2, config) for _ in range(2)], config, by_two)
    for step in range(6):
        group.step(step)
    returned = Island([torch.ones(1)] * 2, config)
    group.islands[1], group.returning = returned, [returned]
    for step in range(6, 24):
        group.step(step)
    for one, weights, agreed in zip(group.islands, case["weights"], case["agreed"], strict=True):
        check_history(one, weights, agreed)


def uneven(island: int, step: int, fragment: int) -> Tensor:
    """What an inner step of rate 1/4 does with the gradients that torchft's two replicas had."""
    kind = (torch.arange(6) + 1) * (2 * island + 1) * (step + 1) + fragment
    return -((kind % 7 - 3).float() / 8).reshape(2, 3) / 4


@pytest.mark.parametrize("case", TORCHFT["unequal"], ids=lambda c: f"{list(c.values())[:5]}")
def test_two_islands_that_differ_follow_torchfts_classes(case):
    config = settings(**{name: value for name, value in case.items() if name != "weights"})
    start = [(torch.arange(6).float().reshape(2, 3) - 2 * layer) / 4 for layer in range(2)]
    if config.fragments == 1:  # torchft's one fragment may be the whole model, ours is one tensor
        start = [torch.cat(start)] if len(case["weights"][0][0]) == 2 else start[:1]
        parts = len(start[0]) // 2

        def change(island: int, step: int, fragment: int) -> Tensor:
            return torch.cat([uneven(island, step, part) for part in range(parts)])
    else:
        change = uneven
    group = Group([Island(start, config) for _ in range(2)], config, change)
    for step in range(12):
        group.step(step)
    for one, expected in zip(group.islands, case["weights"], strict=True):
        mine = torch.tensor(one.history).reshape(12, -1)
        torch.testing.assert_close(mine, torch.tensor(expected).reshape(12, -1), rtol=0, atol=1e-6)
    # While they train alone, and where some of that stays, they differ: else this compares little.
    first, second = (torch.tensor(one.history) for one in group.islands)
    assert not torch.equal(first, second)
    assert group.islands[0].agreed == group.islands[1].agreed


# -- the average ----------------------------------------------------------------------------------

FLOATS = st.lists(
    st.floats(allow_nan=False, width=32) | st.sampled_from([-0.0, 1e-45, 3.4e38]),
    min_size=1,
    max_size=5,
)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


@given(FLOATS, st.lists(st.integers(0, 2**26), min_size=1, max_size=7).filter(any))
def test_the_mean_of_equal_tensors_is_that_tensor_to_the_bit(values, weights):
    tensor = torch.tensor(values)
    assert bits(weighted_mean([(weight, {"w": tensor}) for weight in weights])["w"]) == bits(tensor)


def test_islands_count_by_the_tokens_that_they_have_trained():
    generator = torch.Generator().manual_seed(0)
    weights = [1000, 10, 333]
    parts = [torch.randn(50, generator=generator) for _ in weights]
    mean = weighted_mean([(w, {"w": p}) for w, p in zip(weights, parts, strict=True)])["w"]
    exact = np.average([p.double().numpy() for p in parts], axis=0, weights=weights)
    np.testing.assert_array_equal(mean.numpy(), exact.astype(np.float32))


def test_an_island_without_tokens_has_no_weight_in_the_mean():
    nothing = {"w": torch.tensor([float("nan")])}
    assert weighted_mean([(0, nothing), (5, {"w": torch.ones(1)})])["w"].item() == 1.0
    with pytest.raises(ValueError, match="no island has trained"):
        weighted_mean([(0, nothing)])


# -- the outer step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plain", [{"outer_momentum": 0, "outer_learning_rate": 1}, {"method": "local_sgd"}]
)
@given(old=FLOATS, data=st.data())
def test_at_rate_1_without_momentum_an_island_keeps_its_weights(plain, old, data):
    """So do any number of equal ones. The outer gradient alone would not do: old - (old - new)."""
    floats = st.floats(allow_nan=False, width=32)
    new = torch.tensor(data.draw(st.lists(floats, min_size=len(old), max_size=len(old))))
    outer = OuterFragment({"w": torch.tensor(old)}, settings(**plain))
    outer.step(weighted_mean([(tokens, outer.change({"w": new})) for tokens in (7, 1000, 5)]))
    assert bits(outer.mixed({"w": new})["w"]) == bits(new)
    assert bits(outer.weights["w"]) == bits(new)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_that_of_torchs_sgd(momentum):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(40, generator=generator)
    config = settings(outer_momentum=momentum, outer_learning_rate=0.7)
    outer, weight = OuterFragment({"w": start}, config), torch.nn.Parameter(start.clone())
    torchs = torch.optim.SGD([weight], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(8):
        weight.grad = torch.randn(40, generator=generator)
        torchs.step()
        outer.step({"w": weight.grad})
        torch.testing.assert_close(outer.weights["w"], weight.detach(), rtol=1e-6, atol=1e-6)


def test_no_operation_of_the_outer_step_is_fused():
    """Else islands whose processors differ would not have the same bits. numpy fuses nothing."""
    generator = torch.Generator().manual_seed(2)
    outer = OuterFragment({"w": torch.randn(1000, generator=generator)}, settings())
    weight, momentum = outer.weights["w"].numpy().copy(), np.zeros(1000, np.float32)
    rate, decay = np.float32(0.7), np.float32(0.9)
    for _ in range(5):
        gradient = torch.randn(1000, generator=generator)
        outer.step({"w": gradient})
        momentum = momentum * decay + gradient.numpy()
        weight = weight - (gradient.numpy() + momentum * decay) * rate
        np.testing.assert_array_equal(outer.weights["w"].numpy(), weight)


def test_weights_of_16_bits_are_averaged_in_float32_and_keep_their_type():
    local = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    outer = OuterFragment({"w": local}, settings(outer_momentum=0, outer_learning_rate=0.5))
    outer.step({"w": torch.tensor([2**-10, 0.0])})  # too little for 8 significant bits
    outer.step({"w": torch.tensor([2**-7, 0.0])})
    assert outer.weights["w"].tolist() == [1 - 2**-11 - 2**-8, 2.0]
    mixed = outer.mixed({"w": local})["w"]
    assert mixed.dtype == torch.bfloat16
    assert mixed.tolist() == [1 - 2**-8, 2.0]


def test_returned_tensors_do_not_change_later():
    local = torch.ones(3)
    outer = OuterFragment({"w": local}, settings())
    change, state = outer.change({"w": local * 2}), outer.state_dict()
    local.zero_()
    outer.step(change)
    assert state["weights/w"].tolist() == [1.0] * 3
    assert state["momentum/w"].tolist() == [0.0] * 3
    assert outer.weights["w"].tolist() != [1.0] * 3


def test_state_of_other_parameters_or_settings_is_refused():
    outer = OuterFragment({"w": torch.ones(3)}, settings())
    for other in (
        OuterFragment({"v": torch.ones(3)}, settings()),
        OuterFragment({"w": torch.ones(4)}, settings()),
        OuterFragment({"w": torch.ones(3)}, settings(outer_momentum=0)),
    ):
        with pytest.raises(CheckpointError, match="of other parameters or of another kind"):
            outer.load_state_dict(other.state_dict())


def test_fragments_are_whole_layers_balanced_by_bytes_in_the_order_of_the_model():
    assert cut(MODEL, 1) == (tuple(MODEL),)
    first, second = cut(MODEL, 2)
    assert first == ("model.embed_tokens.weight",)
    assert first + second == tuple(MODEL)
    assert [len(part) for part in cut(MODEL, 3)] == [1, 4, 5]
    assert [len(part) for part in cut(MODEL, 6)] == [1, 2, 2, 2, 2, 1]


def test_tensors_of_a_layer_stay_together_wherever_they_stand():
    sizes = {f"h.{layer}.experts.{e}.w": 1 for e in range(3) for layer in range(2)}
    assert cut(sizes, 2) == (
        tuple(f"h.0.experts.{e}.w" for e in range(3)),
        tuple(f"h.1.experts.{e}.w" for e in range(3)),
    )


def test_more_fragments_than_there_is_to_cut_are_refused():
    with pytest.raises(ConfigError, match=r"island.fragments is 7, but only 6 layers or tensors"):
        cut(MODEL, 7)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_other_cut_is_more_even(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))

    def unevenness(ends: tuple[int, ...]) -> int:
        return sum(sum(sizes[a:b]) ** 2 for a, b in pairwise((0, *ends, len(sizes))))

    parts = cut({f"h.{layer}.w": size for layer, size in enumerate(sizes)}, count)
    assert len(parts) == count
    assert all(parts)
    found = sum(sum(sizes[int(name.split(".")[1])] for name in part) ** 2 for part in parts)
    assert found == min(map(unevenness, combinations(range(1, len(sizes)), count - 1)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((20, 1, 0), [(0, 20, 20)]),
        ((20, 2, 2), [(0, 8, 10), (1, 18, 20)]),
        ((6, 2, 1), [(0, 2, 3), (1, 5, 6)]),
        ((7, 3, 1), [(0, 1, 2), (1, 3, 4), (2, 6, 7)]),
    ],
)
def test_each_fragment_has_its_time_in_a_round(settings, expected):
    assert [(s.fragment, s.sent_after, s.applied_after) for s in schedule(*settings)] == expected


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 20))
def test_one_fragment_is_under_way_at_a_time(steps, fragments, delay):
    """With settings as the configuration accepts them: less delay than lies between two."""
    steps = max(steps, fragments * (delay + 1))
    times = [t for s in schedule(steps, fragments, delay) for t in (s.sent_after, s.applied_after)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == steps
    assert all(sent > before for before, sent in zip(times[1::2], times[2::2], strict=False))
