from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.config import TrainingConfig
from hetero_framework.data.batches import SampleOrder
from hetero_framework.extras.islands.ledger import (
    Ledger,
    count_steps,
    order_facts,
    split_step,
    steps_between,
)


def order(
    examples: int = 26, rows: int = 2, accumulation: int = 3, **others: object
) -> SampleOrder:
    settings = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        **others,
    }
    return SampleOrder(examples, TrainingConfig.model_validate(settings))


# -- the steps ------------------------------------------------------------------------------------


def test_steps_are_dealt_in_order_and_only_committed_ones_are_done():
    ledger = Ledger()
    dealt = ledger.deal({"garage": 2, "attic": 4}, total=100)
    assert dealt == {"attic": ((0, 4),), "garage": ((4, 6),)}
    assert ledger.deal({"garage": 2, "attic": 4}, total=100) == dealt  # nothing was committed
    later = ledger.commit([*dealt["attic"], *dealt["garage"]])
    assert later == Ledger(((0, 6),))
    assert later.deal({"attic": 1}, total=100) == {"attic": ((6, 7),)}


def test_the_part_of_a_dead_island_is_dealt_first():
    dealt = Ledger().deal({"a": 3, "b": 3, "c": 3}, total=100)
    ledger = Ledger().commit(dealt["a"]).commit(dealt["c"])
    assert ledger.committed == ((0, 3), (6, 9))
    assert ledger.deal({"a": 2, "c": 3}, total=100) == {"a": ((3, 5),), "c": ((5, 6), (9, 11))}


def test_steps_of_an_island_that_did_not_finish_count():
    dealt = Ledger(((2, 4),)).deal({"a": 4, "b": 2}, total=100)
    assert dealt["a"] == ((0, 2), (4, 6))
    ledger = Ledger(((2, 4),)).commit(steps_between(dealt["a"], 0, 3))
    assert ledger.committed == ((0, 5),)
    assert ledger.count == 5


def test_the_last_steps_are_dealt_in_proportion():
    dealt = Ledger(((0, 91),)).deal({"a": 20, "b": 10}, total=100)
    assert {name: count_steps(part) for name, part in dealt.items()} == {"a": 6, "b": 3}
    assert Ledger(((0, 100),)).deal({"a": 20, "b": 10}, total=100) == {"a": (), "b": ()}


def test_a_step_is_not_committed_twice():
    with pytest.raises(ValueError, match="step 3 was committed before"):
        Ledger(((0, 5),)).commit([(3, 6)])
    with pytest.raises(ValueError, match="not a range of steps"):
        Ledger().commit([(3, 3)])


def test_state_is_small_json():
    ledger = Ledger().commit([(4, 6)]).commit([(0, 3)])
    text = json.dumps(ledger.state_dict())
    assert text == '{"committed": [[0, 3], [4, 6]]}'
    again = Ledger.load_state_dict(json.loads(text))
    assert again == ledger
    assert ledger.commit([(3, 4)]) == Ledger(((0, 6),)) != ledger


ROUNDS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 7), st.integers(0, 9))),
        st.booleans(),
    ),
    max_size=12,
)
"""Who is there, with how many steps it takes and how many it has done when the others average; and
whether that succeeds."""


@given(st.integers(1, 60), ROUNDS)
def test_each_sample_is_trained_once_under_any_membership(examples, rounds):
    """Every member works with a ledger of its own; one that comes or returns has the others'."""
    run, trained = order(examples, 2, 2), Counter[tuple[int, int]]()
    ledgers: dict[str, Ledger] = {}
    known = Ledger()
    last: tuple[dict[str, tuple[int, int]], bool] = ({"z": (1000, 1000)}, True)
    for islands, succeeds in [*(r for r in rounds if r[0]), last]:
        ledgers = {name: ledgers.get(name, known) for name in islands}
        counts = {name: steps for name, (steps, _) in islands.items()}
        deals = [ledger.deal(counts, run.total_steps) for ledger in ledgers.values()]
        assert all(deal == deals[0] for deal in deals)
        done = [steps_between(deals[0][name], 0, islands[name][1]) for name in islands]
        if not succeeds:
            continue
        steps = tuple(steps for part in done for steps in part)
        for step in (step for start, end in steps for step in range(start, end)):
            samples = np.concatenate(run.step_indices(step)).tolist()
            trained.update((step // run.steps_per_epoch, sample) for sample in samples)
        ledgers = {name: ledger.commit(steps) for name, ledger in ledgers.items()}
        assert len(set(ledgers.values())) == 1
        known = Ledger.load_state_dict(next(iter(ledgers.values())).state_dict())
    assert set(trained) == {(epoch, sample) for epoch in range(2) for sample in range(examples)}
    assert set(trained.values()) == {1}
    assert known.committed == ((0, run.total_steps),)


# -- the samples of one step ----------------------------------------------------------------------


def test_a_single_island_gets_the_micro_batches_of_a_plain_run():
    alone = order(examples=27)
    for step in range(alone.total_steps):
        mine = split_step(alone, step, {"a": 0.3})["a"]
        assert [b.tolist() for b in mine] == [b.tolist() for b in alone.step_indices(step)]


def test_parts_follow_each_other_in_micro_batches_of_each_islands_own_size():
    step = np.concatenate(order(train_sampling_strategy="sequential").step_indices(0)).tolist()
    assert step == [0, 1, 2, 3, 4, 5]
    shares = {"b": 1.0, "a": 2.0}
    pairs = order(rows=2, accumulation=3, train_sampling_strategy="sequential")
    threes = order(rows=3, accumulation=2, train_sampling_strategy="sequential")
    assert [b.tolist() for b in split_step(pairs, 0, shares)["a"]] == [[0, 1], [2, 3]]
    assert [b.tolist() for b in split_step(threes, 0, shares)["a"]] == [[0, 1, 2], [3]]
    assert [b.tolist() for b in split_step(threes, 0, shares)["b"]] == [[4, 5]]
    assert split_step(pairs, 0, {"a": 100.0, "b": 1.0})["b"] == []


@given(
    st.integers(1, 40),
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1),
    st.sampled_from([(1, 12), (2, 6), (3, 4), (12, 1)]),
)
def test_a_step_is_shared_without_loss_by_islands_of_any_micro_batch_size(examples, shares, size):
    """Each island cuts by its own file: together they have every sample of the step once."""
    whole = order(examples, 4, 3)
    mine = order(examples, *size)
    assert order_facts(mine, "f") == order_facts(whole, "f")
    for step in range(whole.total_steps):
        parts = split_step(mine, step, shares)
        dealt = [sample for name in sorted(shares) for batch in parts[name] for sample in batch]
        assert dealt == np.concatenate(whole.step_indices(step)).tolist()
        assert all(0 < len(batch) <= size[0] for part in parts.values() for batch in part)


DROPPED = {"samples of a step", "samples of an epoch", "steps"}


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"data_seed": 7}, {"data_seed"}),
        ({"examples": 27}, {"samples of an epoch"}),
        ({"rows": 1}, {"samples of a step", "steps"}),
        ({"max_steps": 5}, {"steps"}),
        ({"train_sampling_strategy": "sequential"}, {"train_sampling_strategy"}),
        ({"rows": 4, "accumulation": 2, "dataloader_drop_last": True}, DROPPED),
        ({"rows": 6, "accumulation": 1}, set()),
    ],
)
def test_islands_that_would_see_other_samples_are_detected(other, differs):
    mine, theirs = order_facts(order(), "f"), order_facts(order(**other), "f")  # type: ignore[arg-type]
    assert {name for name in mine if mine[name] != theirs[name]} == differs
    assert order_facts(order(), "g") != mine
