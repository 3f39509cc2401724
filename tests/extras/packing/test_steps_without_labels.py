"""Steps, micro-batches and evaluations of packed rows of which some have no label, beside TRL's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.trainer.coordinator import train
from tests.integration.oracles import assert_close, read_rows, stock_model, trained_weights
from tests.integration.test_oracle_sft import words
from tests.integration.test_parity import assert_same, weights
from tests.samples import WORDS, save_llama
from tests.unit.data_helpers import CHATML_MARKED, tiny_tokenizer, write_jsonl

pytestmark = [
    pytest.mark.xdist_group("pool2"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning"),
]
ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "bfd": {},
    "bfd_split": {"packing_strategy": "bfd_split"},
    "wrapped": {"packing_strategy": "wrapped"},
    "alone_in_evaluations": {"eval_packing": False, "per_device_eval_batch_size": 1},
    "assistant": {"assistant_only_loss": True},
    "some_micro_batches": {"gradient_accumulation_steps": 4},
    "several_rows": {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3},
    "in_chunks": {"loss_chunk_tokens": 7},
    "smoothed": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 8},
}
OF_DATA = ("packing_strategy", "eval_packing", "assistant_only_loss")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    found = save_llama(tmp_path_factory.mktemp("chat"), vocab_size=400)
    tiny_tokenizer(CHATML_MARKED).save_pretrained(found)
    return found


def rows(path: Path, chats: bool) -> Path:
    """Some with an answer within 24 tokens, most without."""
    draw = random.Random(3)
    pairs = [(words(draw, 3), words(draw, 3)) for _ in range(5)]
    pairs += [(" ".join(draw.choices(WORDS, k=12)), words(draw, 3)) for _ in range(7)]
    if not chats:
        return write_jsonl(path, [{"prompt": a, "completion": f" {b}"} for a, b in pairs])
    roles = ("user", "assistant")
    return write_jsonl(
        path,
        [
            {"messages": [{"role": r, "content": t} for r, t in zip(roles, pair, strict=True)]}
            for pair in pairs
        ],
    )


def settings_of(case: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of data and training."""
    file = str(rows(folder / "rows.jsonl", case == "assistant"))
    given = CASES[case]
    data = {name: given[name] for name in OF_DATA if name in given}
    training = {name: value for name, value in given.items() if name not in data}
    return (
        {"train": file, "eval": file, "packing": True, "max_length": 24, **data},
        {
            **{"num_train_epochs": 1, "learning_rate": 1e-3, "weight_decay": 0.1, "max_steps": -1},
            **{"eval_strategy": "epoch", "token_metrics": True, "lr_scheduler_type": "linear"},
            **{"per_device_eval_batch_size": 1, **ONE, **training},
        },
    )


def lines(output: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (output / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.parametrize("case", CASES)
def test_losses_metrics_and_weights_are_those_of_trl(case, alone, model, tmp_path):
    data, training = settings_of(case, tmp_path)
    plan = [{"id": "local", "start": 0, "end": 6}]
    told = {"model": {"name_or_path": str(model)}, "data": data, "shard_plan": plan}
    config = alone(training=training, **told)
    train(config)
    table = datasets.Dataset.from_list(read_rows(Path(data["train"])))
    known = {n: v for n, v in (data | training).items() if n in SFTConfig.__dataclass_fields__}
    arguments = SFTConfig(
        str(tmp_path / "trl"),
        **{**known, "optim": "adamw_torch", "bf16": False, "use_cpu": True, "disable_tqdm": True},
        **{"logging_steps": 1, "report_to": "none", "dataloader_pin_memory": False},
        **{"save_strategy": "no"},
    )
    sets = {"train_dataset": table, "eval_dataset": table}
    sets["processing_class"] = AutoTokenizer.from_pretrained(model)
    theirs = SFTTrainer(stock_model(model), arguments, **sets)
    theirs.train()
    history = theirs.state.log_history[:-1]
    found = lines(config.output_dir)
    assert len(found) == len(history)
    names = ["loss", "grad_norm", *objective_of(config.training).metric_names, "num_tokens"]
    names += [f"eval_{name}" for name in names]
    for one, two in zip(found, history, strict=True):
        for name in two.keys() & {*names}:
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-7), (name, two)
    without = [line for line in found if line.get("grad_norm") == 0]
    assert bool(without) is (training["gradient_accumulation_steps"] == 1)
    assert_close(weights(config.output_dir), trained_weights(theirs.model), atol=1e-5)


@pytest.mark.parametrize(
    "training",
    [pytest.param({}, marks=pytest.mark.long), {"fp16": True, "gradient_checkpointing": True}],
)
def test_every_cut_gives_the_bits_of_one_process(training, losses, model, tmp_path):
    data, others = settings_of("bfd", tmp_path)
    sections = {"model": {"name_or_path": str(model)}, "data": data}
    sections["training"] = others | {"label_smoothing_factor": 0.1} | training
    whole = losses([], "whole", **sections)
    assert 0 < sum(norm == 0 for _, norm, _ in whole) < len(whole)
    for cuts in ([3], [2, 4]):
        name = "-".join(map(str, cuts))
        assert losses(cuts, name, **sections) == whole
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))
