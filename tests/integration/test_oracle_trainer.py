"""transformers.Trainer in one process agrees with three stages over real sockets, step by step."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from tests.cases import seldom
from tests.integration.oracles import (
    assert_agree,
    assert_close,
    save_adapter,
    seeded_noise,
    stock_model,
    tokenized,
    trained_weights,
    trainer_run,
)
from tests.integration.test_outputs import save_tiny
from tests.integration.test_parity import assert_same, weights
from tests.samples import read_jsonl, save_llama

pytestmark = pytest.mark.xdist_group("pool")

# The data and the rest of the settings are the fixtures': uneven lengths, accumulation 4, three
# epochs with a partial last micro-batch and step, warm-up and cosine, clipping at 0.5.
CASES = {
    "decay": {"weight_decay": 0.1},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "adafactor": {"optim": "adafactor"},
    "sgd_linear": {"optim": "sgd", "lr_scheduler_type": "linear", "learning_rate": 0.05},
    "max_steps": {"max_steps": 5, "data_seed": 3, "gradient_accumulation_steps": 3},
    "smoothing": {"label_smoothing_factor": 0.1, "bf16": True},
    "smoothing_in_chunks": {"label_smoothing_factor": 1.0, "loss_chunk_tokens": 16},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "drop_last": {"dataloader_drop_last": True, "num_train_epochs": 1.5, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("case", seldom(CASES, "checkpointing", "sgd_linear", "smoothing"))
def test_full_training_agrees_with_trainer(case, losses, llama, texts, tmp_path):
    training = CASES[case]
    ours = losses([2, 4], training=training)
    theirs, trained = trainer_run(llama, texts, tmp_path / "trainer", **training)
    assert_agree(ours, theirs)
    assert_close(weights(tmp_path / "run"), trained)


@pytest.mark.parametrize(
    "lora", [pytest.param(False, marks=pytest.mark.long), True], ids=["full", "saved_embedding"]
)
def test_noise_of_the_same_seeds_agrees_with_trainer(
    lora, losses, llama, texts, tmp_path, monkeypatch
):
    """In evaluations, too, which have none."""
    training = {"neftune_noise_alpha": 5.0, "eval_strategy": "epoch", "seed": 7}
    sections: dict[str, Any] = {}
    adapter = None
    if lora:
        saved = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
        adapter = save_adapter(llama, tmp_path / "adapter", **saved)
        sections = {"adapter": {"init_from": str(adapter)}}
    files = {"train": str(texts), "eval": str(texts), "max_length": 64}
    ours = losses([2, 4], data=files, training=training, **sections)
    plain = losses([2, 4], "plain", data=files, training={**training, "neftune_noise_alpha": 0})
    assert ours != plain
    del training["eval_strategy"]
    seeded_noise(monkeypatch, 7, [4, 4, 3] * 3)
    theirs, trained = trainer_run(llama, texts, tmp_path / "trainer", adapter, **training)
    assert_agree(ours, theirs)
    assert_close(weights(tmp_path / "run"), trained)


@pytest.mark.parametrize(
    "training",
    [{"weight_decay": 0.1}, pytest.param({"bf16": True}, marks=pytest.mark.long)],
    ids=["decay", "bf16"],
)
def test_lora_agrees_with_trainer(training, losses, llama, texts, tmp_path):
    adapter = save_adapter(llama, tmp_path / "adapter")
    ours = losses([2, 4], training=training, adapter={"init_from": str(adapter)})
    theirs, trained = trainer_run(llama, texts, tmp_path / "trainer", adapter, **training)
    assert_agree(ours, theirs)
    assert_close(weights(tmp_path / "run"), trained)


def test_tied_embeddings_agree_with_trainer(losses, texts, tmp_path):
    model = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    ours = losses([2, 4], model={"name_or_path": str(model)})
    theirs, trained = trainer_run(model, texts, tmp_path / "trainer")
    assert_agree(ours, theirs)
    del trained["lm_head.weight"]  # a checkpoint holds the one weight once
    assert_close(weights(tmp_path / "run"), trained)


@pytest.mark.parametrize(
    "training",
    [{"bf16": True}, pytest.param({"fp16": True}, marks=pytest.mark.long)],
    ids=["bf16", "fp16"],
)
def test_blocks_without_a_norm_in_front_equal_one_process_in_autocast(training, losses, tmp_path):
    """Three projections read the hidden state as it arrives."""
    sections = {"model": {"name_or_path": str(save_tiny(tmp_path / "model", "olmo2"))}}
    training = {"max_steps": 3, **training}
    whole = losses([], "whole", training=training, **sections)
    for number, changes in enumerate(({}, {"gradient_checkpointing": True})):
        name = f"cut{number}"
        assert losses([2, 4], name, training={**training, **changes}, **sections) == whole
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))


def test_a_stored_head_under_tied_embeddings_agrees_with_trainer(losses, texts, tmp_path):
    """transformers keeps it, though config.json says that it is the embedding."""
    model = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**tensors, "lm_head.weight": head}, model / "model.safetensors", {"format": "pt"})
    ours = losses([2, 4], model={"name_or_path": str(model)})
    theirs, trained = trainer_run(model, texts, tmp_path / "trainer")
    assert_agree(ours, theirs)
    assert_close(weights(tmp_path / "run"), trained)
    result = stock_model(tmp_path / "run" / "model")
    assert not result.config.tie_word_embeddings
    assert_close(trained_weights(result), trained)


# GPT-2's class has a name from which the Trainer does not know its loss; it counts other items.
NO_DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_moe": {},
    "gemma2": {},
}
# More than the hidden state crosses their boundaries.
WITH_SIDES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "gemma3n_text": {},
    "gemma4_text": {"vocab_size_per_layer_input": 320},
    "qwen4_exp_text": {},
    # One transformer in two layers.
    "zamba2": {},
}


@pytest.mark.long
# The Trainer adds the routers' loss to that of each micro-batch, whatever their number.
@pytest.mark.parametrize(
    "way",
    [{}, {"lora": True, "gradient_checkpointing": True}],
    ids=["full", "lora"],
)
def test_the_loss_of_routers_agrees_with_trainer(way, losses, texts, tmp_path):
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    model = save_tiny(tmp_path / "model", "mixtral", **routers)
    training = {"max_steps": 3, "warmup_steps": 0, "weight_decay": 0.5}
    training |= {name: value for name, value in way.items() if name != "lora"}
    adapter = (
        save_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
        if "lora" in way
        else None
    )
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}, "training": training}
    if adapter is not None:
        sections["adapter"] = {"init_from": str(adapter)}
    ours = losses([2, 4], **sections)
    theirs, trained = trainer_run(model, texts, tmp_path / "trainer", adapter, **training)
    assert_agree(ours, theirs)
    result = tmp_path / "run"
    # A checkpoint holds each expert by itself, the model all of a layer in one tensor.
    found = weights(result) if adapter else trained_weights(stock_model(result / "model"))
    assert_close(found, trained)
    off = {**sections, "model": {"name_or_path": str(model), "router_aux_loss_coef": 0.0}}
    assert losses([2, 4], "off", **off) != ours


@pytest.mark.parametrize(
    ("name", "weight", "smoothing"),
    [
        ("mixtral", "router_aux_loss_coef", 0.0),
        pytest.param("mixtral", "router_aux_loss_coef", 0.1, marks=pytest.mark.long),
        pytest.param("jetmoe", "aux_loss_coef", 0.0, marks=pytest.mark.long),
    ],
)
def test_the_loss_of_an_evaluation_has_that_of_routers(
    name, weight, smoothing, losses, texts, tmp_path
):
    """Not the loss over tokens, nor the perplexity, nor a smoothed loss."""
    model = save_tiny(tmp_path / "model", name, output_router_logits=True, **{weight: 0.5})
    training = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    training |= {"per_device_eval_batch_size": 3, "label_smoothing_factor": smoothing}
    files = {"train": str(texts), "eval": str(texts), "max_length": 64}
    sections = {"model": {"name_or_path": str(model)}, "data": files, "training": training}
    found = []
    for name, cuts in (("whole", []), ("cut", [2, 4])):
        losses(cuts, name, **sections)
        line = read_jsonl(tmp_path / name / "metrics.jsonl")[-1]
        found.append([line[f"eval_{part}"] for part in ("loss", "token_loss", "perplexity")])
    assert found[0] == found[1]
    trained = tmp_path / "cut" / "model"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    told = {**training, "report_to": "none", "use_cpu": True}
    trainer = Trainer(
        stock_model(trained),
        TrainingArguments(str(tmp_path / "trainer"), **told),
        eval_dataset=tokenized(texts, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    of_all, of_tokens, perplexity = found[0]
    assert of_all == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    assert (of_all > of_tokens + 0.5) == (smoothing == 0)
    assert perplexity == pytest.approx(math.exp(of_tokens))


@pytest.mark.parametrize(
    ("model_type", "smoothing"),
    [
        ("qwen3_moe", 0.2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in product(NO_DROPOUT, [0.0, 0.2])),
        *(pytest.param(*case, marks=pytest.mark.long) for case in product(WITH_SIDES, [0.0, 0.2])),
    ],
)
def test_other_architectures_agree_with_trainer(model_type, smoothing, losses, texts, tmp_path):
    model = save_tiny(tmp_path / "model", model_type, **(NO_DROPOUT | WITH_SIDES)[model_type])
    training = {"max_steps": 3, "warmup_steps": 0, "weight_decay": 0.5}
    training |= {"label_smoothing_factor": smoothing}
    ours = losses([2, 4], model={"name_or_path": str(model)}, training=training)
    theirs, _ = trainer_run(model, texts, tmp_path / "trainer", **training)
    assert_agree(ours, theirs)
