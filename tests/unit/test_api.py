"""`train` from Python without a configuration: what becomes of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from peft import AdaLoraConfig, IA3Config, LoraConfig
from transformers import LlamaConfig, TrainingArguments
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

from hetero_framework import train
from hetero_framework.config import Config, load_config
from hetero_framework.errors import ConfigError, UserError
from hetero_framework.trainer import coordinator
from hetero_framework.trainer.python_data import with_objects
from tests.installed import needs

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva':UserWarning"),
    pytest.mark.filterwarnings("ignore:`warmup_ratio` is deprecated:FutureWarning"),
]
TEXTS = [{"text": "a text"}]
PAIRS = [{"prompt": "a", "chosen": " b", "rejected": " c"}]
RATED = [{"prompt": "a", "completion": " b", "label": True}]
CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}


# Lines of the log are another matter, the reference is always asked before the first step, and a
# loss that is not named is the objective's own.
MEANT = {"log_level", "precompute_ref_log_probs", "loss_type"}


@dataclass
class Newer(SFTConfig):
    """Of a version that has a further field."""

    new_field: int = 3


def with_typo(config: Any) -> Any:
    config.learning_rat = 3
    return config


@pytest.fixture
def configured(monkeypatch):
    """configured(**arguments): the configuration that `train` trains, with the rest of them."""

    def run(config, **more):
        return SimpleNamespace(config=config, more=more)

    monkeypatch.setattr(coordinator, "train", run)
    return lambda **given: train(**{"model": "org/name", **given})


def settings_of(config: Config) -> dict[str, Any]:
    return config.to_dict()


def test_a_dictionary_is_a_section(configured):
    made = configured(
        adapter={"r": 4},
        data={"max_length": 64},
        training={"max_steps": 2, "learning_rate": 1e-3},
        train_dataset=TEXTS,
        resume="latest",
    )
    assert made.more == {"train_dataset": TEXTS, "resume": "latest"}
    assert made.config.model.name_or_path == "org/name"
    assert made.config.adapter.r == 4
    assert made.config.data.max_length == 64
    assert made.config.training.max_steps == 2
    assert made.config.training.objective == "sft"


@pytest.mark.parametrize(
    ("adapter", "rank", "kind"),
    [
        pytest.param(None, None, None, id="none"),
        pytest.param("lora", 16, None, id="lora"),
        pytest.param(LoraConfig(r=4), 4, None, id="of peft", marks=needs("convert")),
    ],
)
def test_adapters(adapter, rank, kind, configured):
    config = configured(adapter=adapter, train_dataset=TEXTS).config
    assert (config.adapter and config.adapter.r) == rank
    assert config.model.quantization == kind


@needs("convert")
def test_the_configuration_of_an_adapter_is_taken_whole(configured):
    theirs = LoraConfig(
        r=4,
        lora_alpha=3,
        lora_dropout=0.1,
        target_modules=["v_proj", "q_proj"],
        use_rslora=True,
        modules_to_save=["lm_head"],
        rank_pattern={"q_proj": 2},
        task_type="CAUSAL_LM",
    )
    ours = configured(adapter=theirs, train_dataset=TEXTS).config.adapter
    assert (ours.r, ours.lora_alpha, ours.lora_dropout, ours.use_rslora) == (4, 3, 0.1, True)
    assert set(ours.target_modules) == {"q_proj", "v_proj"}
    assert ours.modules_to_save == ("lm_head",)
    assert ours.rank_pattern == {"q_proj": 2}


@needs("convert")
def test_defaults_of_training_are_trls_with_its_object_alone(configured):
    adapter = LoraConfig(r=4)
    own = configured(adapter=adapter, train_dataset=TEXTS).config.training
    assert own.learning_rate == type(own)().learning_rate
    mixed = configured(adapter=adapter, training={"max_steps": 3}, train_dataset=TEXTS).config
    assert mixed.training.learning_rate == own.learning_rate
    theirs = configured(adapter=adapter, training=SFTConfig(**CPU), train_dataset=TEXTS).config
    assert theirs.training.learning_rate == SFTConfig(**CPU).learning_rate
    assert theirs.adapter.r == 4


@needs("convert", "preferences", "classification")
@pytest.mark.parametrize(
    ("cls", "rows", "objective"),
    [
        (SFTConfig, TEXTS, "sft"),
        (DPOConfig, PAIRS, "dpo"),
        (KTOConfig, RATED, "kto"),
        (RewardConfig, PAIRS, "reward"),
    ],
)
def test_the_configurations_of_trl_name_their_objective(cls, rows, objective, configured):
    theirs = cls(max_steps=7, per_device_train_batch_size=2, seed=5, **CPU)
    config = configured(training=theirs, train_dataset=rows).config
    assert config.training.objective == objective
    assert config.training.learning_rate == theirs.learning_rate
    assert (config.training.max_steps, config.training.seed) == (7, 5)
    assert config.training.report_to == ()
    assert not config.training.bf16
    assert config.coordinator.device == "cpu"


@needs("convert", "preferences", "classification")
@pytest.mark.parametrize("cls", [SFTConfig, TrainingArguments, DPOConfig, KTOConfig, RewardConfig])
def test_what_nobody_changed_in_an_object_is_as_the_object_has_it(cls, configured):
    """Neither the defaults of this project nor those of another class count."""
    arguments = cls(**CPU)
    config = configured(adapter=LoraConfig(), training=arguments, train_dataset=TEXTS).config
    pairs = (config.adapter, LoraConfig()), (config.training, arguments)
    found = {
        name: (getattr(ours, name) or None, getattr(theirs, name) or None)
        for ours, theirs in pairs
        for name in type(ours).model_fields.keys() & vars(theirs).keys()
    }
    assert {name for name, (one, other) in found.items() if one != other} <= MEANT


@needs("convert")
def test_evaluations_need_data(configured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = SFTConfig(eval_strategy="steps", eval_steps=3, **CPU)
    config = configured(training=theirs, train_dataset=TEXTS, eval_dataset=TEXTS).config
    assert (config.training.eval_strategy, config.training.eval_steps) == ("steps", 3)
    config = configured(training=theirs, train_dataset=TEXTS).config
    with pytest.raises(ConfigError, match="needs evaluation data"):
        with_objects(config, {"train_dataset": TEXTS}).require("model", "data")


@needs("convert")
def test_training_arguments_are_taken(configured):
    theirs = TrainingArguments(
        warmup_steps=3, optim="sgd", num_train_epochs=2, dataloader_drop_last=True, **CPU
    )
    config = configured(training=theirs, train_dataset=TEXTS).config
    assert (config.training.warmup_steps, config.training.optim) == (3, "sgd")
    assert config.training.num_train_epochs == 2
    assert config.training.dataloader_drop_last
    assert config.training.learning_rate == theirs.learning_rate


@needs("preferences", "classification")
@pytest.mark.parametrize(
    ("rows", "objective"),
    [(TEXTS, "sft"), (PAIRS, "dpo"), (RATED, "kto"), ([{"text": "a", "label": 1}], None)],
)
@pytest.mark.parametrize("form", [list, datasets.Dataset.from_list])
def test_without_an_objective_the_rows_tell_it(rows, objective, form, configured):
    config = configured(train_dataset=form(rows)).config
    assert config.training.objective == objective or objective is None


def test_rows_that_can_be_read_once_are_not_looked_at(configured):
    rows = iter(PAIRS)
    assert configured(train_dataset=rows).config.training.objective == "sft"
    assert next(rows) == PAIRS[0]


@needs("convert")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda: {"adapter": "lorra"}, "'lorra' is not"),
        (lambda: {"adapter": 3}, "adapter: an object of the class int is not"),
        (lambda: {"adapter": IA3Config()}, "IA3Config is not taken"),
        (lambda: {"adapter": AdaLoraConfig(total_step=9)}, "AdaLoraConfig is not taken"),
        (lambda: {"adapter": with_typo(LoraConfig())}, "learning_rat: 3: no field of a version"),
        (lambda: {"training": SFTConfig}, "training: an object of the class type is not"),
        (lambda: {"training": "fast"}, "training: an object of the class str is not"),
        (lambda: {"training": with_typo(SFTConfig(**CPU))}, "learning_rat: 3"),
        (lambda: {"training": Newer(new_field=4, **CPU)}, "new_field: 4"),
        (lambda: {"training": {"max_stepz": 3}}, 'did you mean "max_steps"'),
        (lambda: {"training": SFTConfig(fsdp="full_shard", **CPU)}, "fsdp"),
        (lambda: {"adapter": LoraConfig(megatron_config={"a": 1})}, "megatron_config"),
        (lambda: {"adapter": LoraConfig(init_lora_weights="eva")}, "eva"),
        (lambda: {"data": {"max_lenght": 3}}, 'did you mean "max_length"'),
        (lambda: {"data": {"train": "rows.jsonl"}}, "data.train and train_dataset both"),
        (lambda: {"data": {"val_set_size": 1}, "eval_dataset": TEXTS}, "val_set_size and eval_d"),
    ],
    ids=lambda value: "" if callable(value) else value,
)
def test_what_cannot_be_had_is_refused_by_its_name(arguments, said, configured):
    with pytest.raises(ConfigError, match=said):
        configured(train_dataset=TEXTS, **arguments())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": LlamaConfig()}, "model is a LlamaConfig, but each"),
        ({"data": "rows.jsonl"}, "'rows.jsonl' is no dictionary"),
    ],
)
def test_an_object_in_the_place_of_a_name_is_refused(arguments, said, configured):
    with pytest.raises(UserError, match=said):
        configured(**arguments)


def test_a_configuration_and_parts_of_one_exclude_each_other():
    config = load_config(
        {"coordinator": {"ip": "127.0.0.1"}, "shard_plan": [{"id": "local", "start": 0, "end": 1}]}
    )
    with pytest.raises(UserError, match="model and training: the configuration says it"):
        train(config, model="x", training={})
    with pytest.raises(UserError, match="needs a configuration, or model"):
        train()
