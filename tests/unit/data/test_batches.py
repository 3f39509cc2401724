from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hetero_framework.config import TrainingConfig
from hetero_framework.data.batches import SampleOrder, collate, num_items, pack, token_count
from hetero_framework.data.examples import Examples, ExamplesBuilder
from hetero_framework.errors import DataError
from tests.unit.data_helpers import QUIET, examples_of, tiny_llama

PAD = 0


def built(*rows: tuple[list[int], list[bool]]) -> Examples:
    builder = ExamplesBuilder()
    for ids, trained in rows:
        builder.add(ids, trained)
    return builder.build()


def some_examples(count: int) -> Examples:
    """Example i begins with the token i + 1, so that batches tell which examples are in them."""
    lengths = [2 + (index * 7) % 5 for index in range(count)]
    marks = [[position % 3 != 1 for position in range(length)] for length in lengths]
    return built(*(([k + 1] * length, marks[k]) for k, length in enumerate(lengths)))


class RecordingTrainer(Trainer):
    """The Trainer's own loop with a forward pass that only writes down what arrives."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = []
        self.open = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.open.append(({k: v.clone() for k, v in inputs.items()}, int(num_items_in_batch)))
        return torch.zeros(())


class Steps(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.steps.append((self.trainer.open, state.epoch))
        self.trainer.open = []


def trainer_steps(examples: Examples, tmp_path, **arguments):
    rows = [
        {"input_ids": ids.tolist(), "labels": labels.tolist(), "row": row}
        for row, (ids, labels) in enumerate(examples[i] for i in range(len(examples)))
    ]
    trainer = RecordingTrainer(
        tiny_llama(100),
        TrainingArguments(
            str(tmp_path), remove_unused_columns=False, max_grad_norm=0.0, **QUIET, **arguments
        ),
        train_dataset=rows,
        data_collator=lambda batch: collate(examples, [row["row"] for row in batch], PAD),
    )
    trainer.add_callback(Steps(trainer))
    trainer.train()
    return trainer.steps


CASES = [
    # examples, batch, accumulation, epochs, drop_last, max_steps, seed, data_seed, strategy
    (13, 2, 4, 3, False, -1, 42, None, "random"),
    (13, 2, 3, 2.5, False, -1, 0, None, "random"),
    (13, 2, 3, 2, True, -1, 7, None, "random"),
    (5, 2, 4, 3, False, -1, 1, None, "random"),
    (1, 4, 2, 1.2, False, -1, 1, 0, "random"),
    (12, 3, 2, 1, False, 7, 42, 2**31, "random"),
    (12, 3, 2, 9, True, 3, 42, 5, "random"),
    (10, 4, 1, 0.3, False, -1, 3, None, "sequential"),
    (64, 5, 2, 2, False, -1, 4294967295, None, "random"),
    (64, 2, 3, 3, False, -1, 7, None, "group_by_length"),
    (13, 2, 4, 2.5, True, -1, 0, None, "group_by_length"),
    (3, 4, 2, 2, False, -1, 1, None, "group_by_length"),
]


SETTINGS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "dataloader_drop_last", "max_steps", "seed", "data_seed", "train_sampling_strategy",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_step_order_equals_the_trainer(tmp_path, case):
    count, settings = case[0], dict(zip(SETTINGS, case[1:], strict=True))
    examples = some_examples(count)
    expected = trainer_steps(examples, tmp_path, **settings)
    order = SampleOrder(count, TrainingConfig(**settings), examples.lengths)
    assert order.total_steps == len(expected)
    # Backwards: a step must not depend on what was asked before.
    for step in reversed(range(len(expected))):
        micro_batches, epoch = expected[step]
        ours = [collate(examples, rows, PAD) for rows in order.step_indices(step)]
        assert order.epoch_of(step) == epoch
        assert len(ours) == len(micro_batches)
        for batch_ours, (batch_theirs, items) in zip(ours, micro_batches, strict=True):
            assert items == num_items(ours)
            assert batch_ours.keys() == batch_theirs.keys()
            assert all(torch.equal(batch_ours[key], batch_theirs[key]) for key in batch_ours)


def test_step_order_asking_does_not_touch_the_random_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    SampleOrder(50, TrainingConfig(per_device_train_batch_size=4)).step_indices(17)
    assert torch.equal(before, torch.get_rng_state())


def test_step_order_each_epoch_has_every_example_once_in_another_order():
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    order = SampleOrder(11, TrainingConfig(**settings))
    steps = [np.concatenate(order.step_indices(step)) for step in range(order.total_steps)]
    epochs = np.concatenate(steps).reshape(3, 11)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(11))
    assert list(epochs[0]) != list(epochs[1])


def test_step_order_of_one_length_together_is_drawn_alike_from_any_epoch_on():
    """A resumed run asks for a late epoch first; the largest micro-batch is looked for in all."""
    examples = some_examples(40)
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 6}
    training = TrainingConfig(**settings, train_sampling_strategy="group_by_length")
    whole = SampleOrder(40, training, examples.lengths)
    steps = [whole.step_indices(step)[0].tolist() for step in range(whole.total_steps)]
    assert len({tuple(map(tuple, steps[k : k + 20])) for k in range(0, 120, 20)}) == 6
    for first in (119, 60, 0, 20, 99):
        order = SampleOrder(40, training, examples.lengths)
        assert order.step_indices(first)[0].tolist() == steps[first]
        assert order.largest(examples.lengths, 0) == (0, 0)
        assert order.step_indices(0)[0].tolist() == steps[0]
    padding = sum(int(np.ptp(examples.lengths[rows])) for rows in steps)
    random = SampleOrder(40, TrainingConfig(**settings))
    shuffled = [random.step_indices(step)[0] for step in range(120)]
    assert padding < sum(int(np.ptp(examples.lengths[rows])) for rows in shuffled) / 2


def test_step_order_nothing_left_by_drop_last_is_an_error():
    with pytest.raises(DataError, match="3 examples do not fill one micro-batch of 4"):
        SampleOrder(3, TrainingConfig(per_device_train_batch_size=4, dataloader_drop_last=True))


@pytest.mark.parametrize(("packed", "multiple"), [(False, 1), (False, 8), (True, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_largest_micro_batch_is_that_of_all_tensors_that_follow(packed, drop_last, multiple):
    draw = np.random.default_rng(0)
    for count in (3, 7, 16, 23):
        examples = examples_of(*draw.integers(2, 40, count).tolist())
        settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
        settings |= {"num_train_epochs": 2.4, "dataloader_drop_last": drop_last}
        order = SampleOrder(count, TrainingConfig(**settings))
        for first in range(order.total_steps + 1):
            sizes = {}
            for step in range(first, order.total_steps):
                for number, rows in enumerate(order.step_indices(step)):
                    how = () if packed else (PAD, multiple)
                    made = (pack if packed else collate)(examples, rows, *how)
                    sizes[step, number] = made["input_ids"].numel()
            lengths = np.diff(examples.offsets)
            found = order.largest(lengths, first, packed=packed, multiple=multiple)
            wanted = max(sizes, key=sizes.__getitem__) if sizes else None
            assert found == wanted, (count, first)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
def test_padding_is_that_of_the_first_epoch(drop_last, multiple):
    examples = examples_of(*np.random.default_rng(1).integers(2, 40, 17).tolist())
    training = TrainingConfig(per_device_train_batch_size=3, dataloader_drop_last=drop_last)
    order = SampleOrder(17, training)
    rows = [rows for step in range(order.steps_per_epoch) for rows in order.step_indices(step)]
    batches = [collate(examples, numbers, PAD, multiple) for numbers in rows]
    masks = [batch["attention_mask"] for batch in batches]
    share = 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    assert order.padded(examples.lengths, multiple) == pytest.approx(share, rel=1e-12)


def test_collate_pads_right_to_the_longest_and_ignores_padding():
    batch = collate(built(([5, 6, 7], [False, True, True]), ([8], [True])), [1, 0], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[8, 9, 9], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[8, -100, -100], [-100, 6, 7]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert num_items([batch]) == 2


@pytest.mark.parametrize(("multiple", "length"), [(1, 3), (2, 4), (3, 3), (8, 8), (None, 3)])
def test_collate_pads_to_a_multiple(multiple, length):
    batch = collate(examples_of(3), [0], 0, multiple)
    assert {tensor.shape for tensor in batch.values()} == {(1, length)}


@pytest.mark.parametrize("rows", [[3], [0, 4, 2], list(range(9))])
def test_pack_equals_the_library_s_flattening(rows):
    examples = some_examples(9)
    features = [dict(zip(("input_ids", "labels"), examples[row], strict=True)) for row in rows]
    features = [{name: ids.tolist() for name, ids in feature.items()} for feature in features]
    expected = DataCollatorWithFlattening(return_tensors="pt")(features)
    packed = pack(examples, rows)
    assert packed.keys() == expected.keys()
    assert all(torch.equal(packed[name], expected[name]) for name in packed)
    assert {tensor.dtype for tensor in packed.values()} == {torch.int64}


def test_pack_positions_begin_again_and_no_sample_predicts_the_next():
    packed = pack(built(([5, 6, 7], [False, True, True]), ([8, 9], [True] * 2)), [1, 0])
    assert packed["input_ids"].tolist() == [[8, 9, 5, 6, 7]]
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert packed["labels"].tolist() == [[-100, 9, -100, 6, 7]]


def test_pack_and_collate_count_the_same_tokens_and_losses():
    examples = some_examples(9)
    packed, padded = pack(examples, range(9)), collate(examples, range(9), PAD)
    assert token_count(packed) == token_count(padded) == len(examples.ids)
    assert num_items([packed]) == num_items([padded]) < token_count(packed)


def test_fingerprint_changes_with_ids_labels_and_bounds():
    def fingerprint(*rows):
        return built(*rows).fingerprint

    same = fingerprint(([1, 2, 3], [True] * 3), ([4, 5], [True] * 2))
    others = {
        fingerprint(([1, 2, 3], [True] * 3), ([4, 6], [True] * 2)),
        fingerprint(([1, 2, 3], [True] * 3), ([4, 5], [True, False])),
        fingerprint(([1, 2], [True] * 2), ([3, 4, 5], [True] * 3)),
        fingerprint(([4, 5], [True] * 2), ([1, 2, 3], [True] * 3)),
    }
    assert same == fingerprint(([1, 2, 3], [True] * 3), ([4, 5], [True] * 2))
    assert len(others) == 4
    assert same not in others
