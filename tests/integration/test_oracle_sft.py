"""TRL's SFTTrainer agrees with three stages on the same file, step by step."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from hetero_framework import train
from hetero_framework.cli import main
from hetero_framework.data.formats import ALPACA_WITH_INPUT, ALPACA_WITHOUT_INPUT
from tests.cases import seldom, spread
from tests.integration.oracles import (
    assert_agree,
    assert_close,
    save_adapter,
    sft_run,
    stock_model,
)
from tests.integration.test_parity import weights
from tests.pools import TRAINING
from tests.samples import WORDS, save_llama
from tests.unit.data_helpers import CHATML_MARKED, tiny_tokenizer, write_jsonl

pytestmark = pytest.mark.xdist_group("pool2")

Rows = list[dict[str, Any]]
COUNT = 21


def words(draw: random.Random, longest: int = 12) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, longest)))


def pairs(draw: random.Random) -> Rows:
    return [{"prompt": words(draw), "completion": " " + words(draw)} for _ in range(COUNT)]


def conversations(draw: random.Random) -> Rows:
    """One to three turns, some after a system message."""
    rows = []
    for number in range(COUNT):
        turns = [
            {"role": role, "content": words(draw, 6)}
            for _ in range(draw.randint(1, 3))
            for role in ("user", "assistant")
        ]
        system = [{"role": "system", "content": words(draw, 4)}] if number % 3 == 0 else []
        rows.append({"messages": system + turns})
    return rows


def conversational_pairs(draw: random.Random) -> Rows:
    return [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        for row in conversations(draw)
    ]


def alpaca(draw: random.Random) -> Rows:
    return [
        {
            "instruction": words(draw),
            "input": words(draw) if number % 2 else "",
            "output": words(draw),
        }
        for number in range(COUNT)
    ]


def as_pairs(rows: Rows) -> Rows:
    """Alpaca's records, formatted the way its authors did; TRL has no such format."""
    return [
        {
            "prompt": (ALPACA_WITH_INPUT if row["input"] else ALPACA_WITHOUT_INPUT).format(**row),
            "completion": row["output"],
        }
        for row in rows
    ]


# Rows of the file, and what both sides are told about it.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (lambda draw: [{"text": words(draw, 24)} for _ in range(COUNT)], {"max_length": 40}),
    "prompt_completion": (pairs, {}),
    "prompt_completion_whole": (pairs, {"completion_only_loss": False, "max_length": 48}),
    "messages": (conversations, {"assistant_only_loss": True, "max_length": 96}),
    "messages_whole": (conversations, {"assistant_only_loss": False}),
    "messages_pairs": (conversational_pairs, {}),
    "alpaca": (alpaca, {}),
    # TRL does not cut to a length without padding.
    "pairs_without_padding": (pairs, {"padding_free": True, "max_length": None}),
}


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A tiny Llama whose tokenizer has a chat template with generation marks."""
    model = save_llama(
        tmp_path_factory.mktemp("chat"), vocab_size=400, max_position_embeddings=1024
    )
    tiny_tokenizer(CHATML_MARKED).save_pretrained(model)
    return model


@pytest.fixture
def agree(losses, chat_model, tmp_path):
    """Train in three stages and with SFTTrainer: the same steps, and the same weights."""

    def compare(
        rows: Path,
        data: dict[str, Any],
        training: dict[str, Any],
        adapter: Path | None = None,
        their_rows: Path | None = None,
    ) -> None:
        sections = {} if adapter is None else {"adapter": {"init_from": str(adapter)}}
        sections |= {"model": {"name_or_path": str(chat_model)}, "training": training}
        ours = losses([2, 4], data={"train": str(rows), **data}, **sections)
        output, settings = tmp_path / "trl", {**data, **training}
        theirs, trained = sft_run(chat_model, their_rows or rows, output, adapter, **settings)
        assert_agree(ours, theirs)
        assert_close(weights(tmp_path / "run"), trained)

    return compare


@pytest.mark.parametrize(
    "case",
    seldom(CASES, *("prompt_completion_whole", "prompt_completion", "messages_whole", "alpaca")),
)
def test_agrees_with_sft_trainer(case, agree, chat_model, tmp_path):
    make, settings = CASES[case]
    rows = make(random.Random(1))
    theirs = None
    if case == "alpaca":
        theirs = write_jsonl(tmp_path / "pairs.jsonl", as_pairs(rows))
    adapter = save_adapter(chat_model, tmp_path / "adapter")
    ours = write_jsonl(tmp_path / "rows.jsonl", rows)
    agree(ours, settings, {"num_train_epochs": 1}, adapter, theirs)


def test_three_epochs_of_full_training_agree_with_sft_trainer(agree, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", conversations(random.Random(2)))
    training = {"weight_decay": 0.1, "gradient_checkpointing": True}
    agree(rows, {"assistant_only_loss": True}, training)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_the_objects_of_peft_and_trl_train_as_in_trl(chat_model, tmp_path):
    """Also what nobody has changed in them, such as the scale and dropout of the adapter."""
    draw = random.Random(3)
    rows = datasets.Dataset.from_list([{"text": words(draw, 20)} for _ in range(COUNT)])
    own = {"use_cpu": True, "bf16": False, "report_to": "none", "learning_rate": 1e-3}
    own |= {"max_steps": 3, "logging_steps": 1, "save_strategy": "no"}
    # Both begin with the same adapter: it has no random numbers.
    adapter = LoraConfig(r=4, init_lora_weights="olora", task_type="CAUSAL_LM")
    training = SFTConfig(tmp_path / "ours", **own)
    ours = train(model=chat_model, train_dataset=rows, adapter=adapter, training=training)
    trainer = SFTTrainer(
        stock_model(chat_model),
        SFTConfig(tmp_path / "theirs", **own),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(chat_model),
        peft_config=adapter,
    )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert ours.losses == pytest.approx(theirs, rel=1e-6)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_smoothed_labels_of_some_tokens_agree_with_sft_trainer(agree, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", pairs(random.Random(5)))
    training = {"label_smoothing_factor": 0.1, "loss_chunk_tokens": 16, "num_train_epochs": 1}
    agree(rows, {"padding_free": True, "max_length": None}, training)


def test_a_converted_configuration_agrees_with_sft_trainer(losses, chat_model, tmp_path):
    """What it does not say are TRL's own defaults, the loss on all turns among them."""
    rows = write_jsonl(tmp_path / "rows.jsonl", conversations(random.Random(4)))
    fields = {**TRAINING, "num_train_epochs": 1, "bf16": False}
    fields = {
        name: value for name, value in fields.items() if name in SFTConfig.__dataclass_fields__
    }
    files = {"model": str(chat_model), "dataset_name": str(rows)}
    (tmp_path / "sft.json").write_text(json.dumps({**files, "SFTConfig": fields}))
    out = tmp_path / "c.json"
    assert main(["convert", str(tmp_path / "sft.json"), "--output", str(out)]) == 0
    made = json.loads(out.read_text())
    del made["training"]["output_dir"]
    made["data"]["train"] = str(rows)
    ours = losses([2, 4], **{name: made[name] for name in ("model", "data", "training")})
    fields |= {"optim": "adamw_torch_fused", "gradient_checkpointing": True}
    theirs, trained = sft_run(chat_model, rows, tmp_path / "trl", **fields)
    assert_agree(ours, theirs)
    assert_close(weights(tmp_path / "run"), trained)


@pytest.mark.long
def test_quantisation_by_machine_agrees_with_sft_trainer(pool, losses, tmp_path):
    model = save_llama(tmp_path / "model", hidden_size=64, intermediate_size=128)
    adapter = save_adapter(model, tmp_path / "adapter")
    rows = write_jsonl(tmp_path / "rows.jsonl", CASES["text"][0](random.Random(1)))
    # Unclipped: the Trainer's norm of gradients in bfloat16 is rounded to three digits.
    training = {"num_train_epochs": 1, "max_grad_norm": 0.0}

    def ours(name: str, cuts: list[int], kinds: list[str | None]) -> Any:
        workers = [
            {**machine, "quantization": kind}
            for machine, kind in zip(pool.machines["workers"], kinds, strict=False)
        ]
        return losses(
            cuts,
            name,
            workers=workers,
            model={"name_or_path": str(model), "quantization": "nf4"},
            data={"train": str(rows), "max_length": 40},
            training=training,
            adapter={"init_from": str(adapter)},
        )

    found = ours("mixed", [2, 4], [None, "none"])
    again = ours("again", [1, 3, 4], ["nf4", "nf4", "none"])  # the same layers, cut otherwise
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "model.layers.4", "model.layers.5"],
    )
    base = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=settings, device_map={"": "cpu"}
    )
    theirs, trained = sft_run(
        model,
        rows,
        tmp_path / "trl",
        whole=PeftModel.from_pretrained(base, adapter, is_trainable=True),
        max_length=40,
        **training,
    )
    assert [loss for loss, _, _ in found] == pytest.approx(
        [loss for loss, _, _ in theirs], rel=1e-5
    )
    # Of bfloat16 matrices: the last of 8 bits is rounded otherwise here and there.
    assert_close(weights(tmp_path / "mixed"), trained, rtol=2**-5, atol=2**-10)
    assert again == found
    assert ours("other", [2, 4], [None, None]) != found


GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]}
# What lies with the base, and what both sides are told.
RESULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all_told": (
        {"generation": GENERATION, "config": {"eos_token_id": 2}},
        {"template": CHATML_MARKED, "eos_token": "<|im_end|>", "pad_token": "<|system|>"},
    ),
    "nothing_told": (
        {"generation": GENERATION, "config": {"eos_token_id": [2, 5]}, "pad_token": None},
        {},
    ),
    "none_there": ({"config": {"eos_token_id": None, "pad_token_id": None}}, {}),
}


def json_files(folder: Path) -> dict[str, Any]:
    found = {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}
    for name in ("hetero_export.json", "adapter_config.json"):
        found.pop(name, None)
    if "config.json" in found:
        del found["config.json"]["use_cache"]  # the Trainer's is off, which slows generation
    templates = sorted(folder.rglob("*.jinja"))
    return found | {str(t.relative_to(folder)): t.read_text("utf-8") for t in templates}


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")
@pytest.mark.parametrize(("case", "lora"), spread([*RESULTS], {"full": False, "lora": True}))
def test_the_result_ends_and_is_asked_as_that_of_sft_trainer(
    case, lora, losses, chat_model, tmp_path
):
    base, told = RESULTS[case]
    model = shutil.copytree(chat_model, tmp_path / "model")
    (model / "generation_config.json").unlink()
    if "generation" in base:
        (model / "generation_config.json").write_text(json.dumps(base["generation"]))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **base["config"]}))
    tokenizer = tiny_tokenizer({"default": CHATML_MARKED, "tool_use": CHATML_MARKED})
    tokenizer.pad_token = base.get("pad_token", tokenizer.pad_token)
    tokenizer.save_pretrained(model)
    settings = {name: value for name, value in told.items() if name != "template"}
    if "template" in told:
        (tmp_path / "chat.jinja").write_text(told["template"])
        settings["chat_template_path"] = str(tmp_path / "chat.jinja")
    rows = write_jsonl(tmp_path / "rows.jsonl", conversations(random.Random(3)))
    adapter = save_adapter(model, tmp_path / "adapter") if lora else None
    sections = {"adapter": {"init_from": str(adapter)}} if lora else {}
    losses(
        [],
        model={"name_or_path": str(model)},
        data={"train": str(rows), "assistant_only_loss": True, **settings},
        training={"max_steps": 1},
        **sections,
    )
    shared = {"assistant_only_loss": True, "max_steps": 1, **settings}
    sft_run(model, rows, tmp_path / "trl", adapter, **shared)
    ours = tmp_path / "run" / ("adapter" if lora else "model")
    assert json_files(ours) == json_files(tmp_path / "trl" / "result")
    if lora:
        merged = tmp_path / "merged"
        command = ["merge", "--adapter", str(ours), "--model", str(model), "--output", str(merged)]
        assert main(command) == 0
        ends = json.loads((merged / "generation_config.json").read_text())["eos_token_id"]
        learned = AutoTokenizer.from_pretrained(ours).eos_token_id
        assert learned in (ends if isinstance(ends, list) else [ends])
        found = json_files(merged)
        assert {k: v for k, v in json_files(ours).items() if found.get(k) != v} == {}
