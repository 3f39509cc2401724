"""Training loops of other libraries over the same files, with which distributed runs are
compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import neftune
from transformers.trainer_pt_utils import get_parameter_names
from trl import SFTConfig, SFTTrainer

from hetero_framework.models.rng import forward_seed
from tests.pools import TRAINING
from tests.samples import read_jsonl as read_rows

Step = tuple[float, float, float]  # loss, norm of the gradient, learning rate
Steps = list[Step]
Tensors = dict[str, torch.Tensor]


def save_adapter(model: Path, directory: Path, **settings: Any) -> Path:
    """A PEFT adapter for the model, both of its matrices random, saved into `directory`."""
    torch.manual_seed(5)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
        | {"init_lora_weights": False}
        | settings,
    )
    get_peft_model(stock_model(model), config).save_pretrained(directory)
    return directory


def stock_model(
    model: Path, adapter: Path | None = None, **settings: Any
) -> PreTrainedModel | PeftModel:
    """The library's own whole model, of the class that its configuration names, with the adapter on
    it if one is given; all to be trained."""
    (name,) = json.loads((model / "config.json").read_text())["architectures"]
    whole = getattr(transformers, name).from_pretrained(model, **settings)
    if adapter is None:
        return whole
    return PeftModel.from_pretrained(whole, adapter, is_trainable=True)


def trained_weights(model: torch.nn.Module) -> Tensors:
    """What training changed: the adapter's tensors, or all weights."""
    if isinstance(model, PeftModel):
        return dict(get_peft_model_state_dict(model))
    return dict(model.state_dict())


def trainer_run(
    model: Path, rows: Path, output: Path, adapter: Path | None = None, **training: Any
) -> tuple[Steps, Tensors]:
    """transformers.Trainer over {"text": ...} lines, tokenised by hand."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        stock_model(model, adapter),
        _arguments(TrainingArguments, output, training),
        train_dataset=tokenized(rows, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    return _logged(trainer), trained_weights(trainer.model)


def seeded_noise(monkeypatch: pytest.MonkeyPatch, seed: int, steps: Sequence[int]) -> None:
    """Have transformers draw NEFTune's noise from our seeds; `steps` are the micro-batches of each
    step."""
    places = iter([(step, k) for step, count in enumerate(steps) for k in range(count)])

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            if module.training:
                torch.manual_seed(forward_seed(seed, *next(places), "noise"))
            return neftune.neftune_post_forward_hook.stock(module, args, output)

    hook.stock = neftune.neftune_post_forward_hook  # type: ignore[attr-defined]
    monkeypatch.setattr(neftune, "neftune_post_forward_hook", hook)


def sft_run(
    model: Path,
    rows: Path,
    output: Path,
    adapter: Path | None = None,
    whole: PeftModel | None = None,
    **settings: Any,
) -> tuple[Steps, Tensors]:
    """TRL's SFTTrainer over the lines of a file; what it leaves is in `output`/result. `whole` is
    another model than the stock one."""
    trainer = SFTTrainer(
        whole or stock_model(model, adapter),
        _arguments(SFTConfig, output, settings),
        train_dataset=datasets.Dataset.from_list(read_rows(rows)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(str(output / "result"))
    return _logged(trainer), trained_weights(trainer.model)


def torch_run(
    model: Path, rows: Path, adapter: Path | None = None, **training: Any
) -> tuple[Steps, Tensors]:
    """A plain loop over the rows of a file, in the order of the Trainer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = _settings(training)
    batches = list(_epochs(tokenized(rows, tokenizer), DataCollatorForSeq2Seq(tokenizer), settings))
    return torch_loop(model, batches, adapter, **training)


def _settings(training: dict[str, Any]) -> dict[str, Any]:
    return {"weight_decay": 0.0, "fp16": False, "max_steps": -1, "seed": 42, **TRAINING, **training}


def torch_loop(
    model: Path, batches: list[list], adapter: Path | None = None, **training: Any
) -> tuple[Steps, Tensors]:
    """A plain loop in torch: the whole model, torch's AdamW, clip_grad_norm_ and GradScaler."""
    settings = _settings(training)
    whole = stock_model(model, adapter)
    whole.train()
    decayed = set(get_parameter_names(whole, [torch.nn.LayerNorm], ["bias", "norm"]))
    named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n in decayed]},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ],
        lr=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
    )
    schedule = get_scheduler(
        settings["lr_scheduler_type"], optimizer, settings["warmup_steps"], len(batches)
    )
    scaler = torch.amp.GradScaler("cpu", enabled=settings["fp16"])
    steps: Steps = []
    for micro_batches in batches:
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        losses = []
        for batch in micro_batches:
            with torch.autocast("cpu", torch.float16, enabled=settings["fp16"]):
                loss = whole(**batch, num_items_in_batch=torch.tensor(float(items))).loss
            scaler.scale(loss).backward()
            losses.append(float(loss.detach()))
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], settings["max_grad_norm"])
        steps.append((math.fsum(losses), float(norm), optimizer.param_groups[0]["lr"]))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if math.isfinite(norm):
            schedule.step()
    return steps, trained_weights(whole)


def _epochs(rows: datasets.Dataset, collate: Any, settings: dict[str, Any]) -> Iterator[list]:
    """The micro-batches of every step, in the order of accelerate's seedable sampler."""
    size = settings["per_device_train_batch_size"]
    for epoch in range(settings["num_train_epochs"]):
        generator = torch.Generator().manual_seed(settings["seed"] + epoch)
        order = torch.randperm(len(rows), generator=generator).tolist()
        micro_batches = [
            dict(collate([rows[i] for i in order[first : first + size]]))
            for first in range(0, len(order), size)
        ]
        count = settings["gradient_accumulation_steps"]
        for first in range(0, len(micro_batches), count):
            yield micro_batches[first : first + count]


def tokenized(rows: Path, tokenizer: Any, max_length: int = 64) -> datasets.Dataset:
    """input_ids, attention_mask and labels of {"text": ...} lines that end in the end token."""
    found = []
    for row in read_rows(rows):
        ids = tokenizer(row["text"] + tokenizer.eos_token)["input_ids"][:max_length]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
    return datasets.Dataset.from_list(found)


def assert_agree(ours: Steps, theirs: Steps) -> None:
    """Every step's loss, norm and learning rate, to 1e-5."""
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        assert one == pytest.approx(other, rel=1e-5, abs=0), f"step {number}"


def assert_close(ours: Tensors, theirs: Tensors, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Weights that took the same steps."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def _arguments(cls: type, output: Path, settings: dict[str, Any]) -> Any:
    """The configuration's `training` section, taken by the library under the same names."""
    known = {field.name for field in fields(cls)}
    chosen = {"optim": "adamw_torch", "bf16": False, "gradient_checkpointing": False, **TRAINING}
    chosen |= settings
    if "activation_checkpointing" in known:  # the name since transformers 5.20
        chosen["activation_checkpointing"] = chosen.pop("gradient_checkpointing")
    return cls(
        **{name: value for name, value in chosen.items() if name in known}
        | {"output_dir": str(output), "logging_steps": 1, "logging_strategy": "steps"}
        | {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    )


def _logged(trainer: Trainer) -> Steps:
    return [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
