from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from peft import LoraConfig
from transformers import TrainingArguments
from trl import SFTConfig

from hetero_framework import registry
from hetero_framework.config import (
    AdapterConfig,
    Config,
    DataConfig,
    ModelConfig,
    TrainingConfig,
    aliases,
    apply_override,
    json_schema,
    load_config,
)
from hetero_framework.config.composition import whole_schema
from hetero_framework.config.effects import settings
from hetero_framework.errors import ConfigError, PlanError
from tests.installed import needs, whole

ROOT = Path(__file__).resolve().parents[3]
SEED: dict[str, Any] = {
    "coordinator": {"hostname": "desk", "ip": "192.168.1.10", "device": "cuda:0"},
    "workers": [
        {"id": 1, "hostname": "box", "ip": "192.168.1.20", "port": 9999, "device": "auto"},
        {"id": 2, "hostname": "mac", "ip": "192.168.1.30", "port": 9999, "device": "mps"},
    ],
    "shard_plan": [
        {"id": "local", "start": 0, "end": 8},
        {"id": 1, "start": 8, "end": 24},
        {"id": 2, "start": 24, "end": 32, "is_last": True},
    ],
    "training": {"visualize": True, "visualization_format": "png", "log_level": "INFO"},
    "checkpoint_dir": "checkpoints",
    "resume_step": None,
}
FULL: dict[str, Any] = {
    **SEED,
    "model": {"name_or_path": "model"},
    "adapter": {"r": 4},
    "data": {"train": "train.jsonl"},
}


EPOCHS_AND_STEPS = {"eval_steps": 5, "eval_strategy": "epoch"}
LOFTQ = {"loftq_bits": 4}
OFFLOADING = "training.activation_offloading"
QUANTISED = {"model.quantization": "nf4"}
REWRITES = "adapter.init_lora_weights: it rewrites the base's weights"
HALF = {"model.dtype": "float16", "training.fp16": True}
OFFLOAD = {"use_reentrant": False, "offload": True}


def changed(path: str, value: Any, base: dict[str, Any] = FULL) -> dict[str, Any]:
    raw = copy.deepcopy(base)
    apply_override(raw, f"{path}={json.dumps(value)}")
    return raw


def message(raw: dict[str, Any], kind: type[ConfigError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        Config.from_dict(raw, "/work").require()
    return str(caught.value)


# -- what is accepted -----------------------------------------------------------------------------


def test_seed_format_is_accepted():
    config = Config.from_dict(SEED, "/base")
    assert config.model is None
    assert config.coordinator.port == 9998
    assert [(s.owner, s.start, s.end, s.is_first, s.is_last) for s in config.plan.stages] == [
        ("local", 0, 8, True, False),
        (1, 8, 24, False, False),
        (2, 24, 32, False, True),
    ]


def test_paths_start_at_the_base_directory(tmp_path):
    config = Config.from_dict(FULL, tmp_path)
    assert config.output_dir == tmp_path / "runs" / "default"
    assert config.checkpoints == tmp_path / "checkpoints"
    assert config.logging_dir == tmp_path / "runs" / "default" / "tensorboard"
    assert config.path("../x") == tmp_path.parent / "x"


def test_to_dict_and_from_dict_are_inverse():
    raw = changed("training.lr_scheduler_kwargs", {"num_cycles": 0.5})
    config = Config.from_dict(raw, "/base")
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())), "/base")
    assert again == config
    assert again.base_dir == config.base_dir


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.learning_rate", 1),
        ("training.num_train_epochs", 2),
        ("training.warmup_steps", 0.1),
        ("training.log_level", "debug"),
        ("data.train", ["a.jsonl", "b.jsonl"]),
        ("data.max_length", None),
        ("adapter.target_modules", "all-linear"),
        ("adapter.target_modules", ["q_proj"]),
        ("adapter.layers_to_transform", [0, 1]),
        ("adapter.init_lora_weights", "gaussian"),
        ("workers[0].ip", "::1"),
        ("workers[0].ip", "box.lan"),
        ("workers[0].ip", "a_1-b." + "c" * 63 + "."),
        ("workers[0].device", "rocm:1"),
        ("resume_step", "latest"),
        ("resume_step", 20),
        ("coordinator.port", 9999),  # another machine has this port, too
    ],
)
def test_valid_values_are_accepted(path, value):
    Config.from_dict(changed(path, value))


def test_resume_step_zero_means_from_the_beginning():
    assert Config.from_dict(changed("resume_step", 0)).resume_step is None


@pytest.mark.parametrize(
    "plan",
    [
        [("local", 0, 0), (1, 0, 16), (2, 16, 32)],
        [("local", 0, 8), (1, 8, 16), (2, 16, 24), (1, 24, 32)],
        [("local", 0, 8), (1, 8, 16), (2, 16, 24), ("local", 24, 32)],
        [("local", 0, 8), (1, 8, 32), (2, 32, 32)],
    ],
)
def test_valid_plans_are_accepted(plan):
    raw = {**SEED, "shard_plan": [{"id": i, "start": s, "end": e} for i, s, e in plan]}
    config = Config.from_dict(raw)
    config.plan.covers(32)


def test_a_plan_without_workers_is_accepted():
    raw = {"coordinator": {"ip": "::1"}, "shard_plan": [{"id": "local", "start": 0, "end": 4}]}
    assert Config.from_dict(raw).plan.stages[0].is_last


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("workers[0].port", "9999", 'workers[0].port: must be a whole number, not the text "9999"'),
        ("workers[0].port", True, "workers[0].port: must be a whole number, not true"),
        ("workers[0].port", 99999, "workers[0].port: must be at most 65535, not 99999"),
        ("workers[0].port", 99.5, "workers[0].port: must be a whole number, not 99.5"),
        ("workers[0].prot", 1, 'workers[0].prot: unknown key; did you mean "port"?'),
        ("workers[0].ip", "http://box", "write only the host, without scheme or path"),
        ("workers[0].ip", "box..lan", 'workers[0].ip: "box..lan" is neither an IP address nor'),
        ("coordinator.ip", "box-.lan", 'coordinator.ip: "box-.lan" is neither'),
        ("workers[0].ip", "", "workers[0].ip: is missing: the machine"),
        ("workers[0].ip", "0.0.0.0", "workers[0].ip: 0.0.0.0 is not an address to connect to"),
        ("workers[0].device", "gpu", 'workers[0].device: "gpu" is not a device'),
        ("workers[0].device", "cdua:0", 'workers[0].device: "cdua:0" is not a device'),
        ("workers[0].device", "npu:x", 'workers[0].device: "npu:x" is not a device'),
        ("workers[0].id", "local", '"local" names the coordinator'),
        ("workers[0].id", "a b", "an id has 1 to 64 letters"),
        ("workers[0].id", 2, "workers[1].id: 2 is the id of workers[0] too"),
        ("workers[0].id", 1.5, "workers[0].id: must be a whole number or a text, not 1.5"),
        ("workers[1].ip", "192.168.1.20", "workers[1].port: 192.168.1.20 port 9999 is that of wo"),
        ("coordinator.learning_rate", 1, 'unknown key here; it belongs in "training"'),
        ("learning_rate", 1, 'learning_rate: unknown key here; it belongs in "training"'),
        ("trainning", {}, 'trainning: unknown key; did you mean "training"?'),
        ("version", "2", 'version: must be "1", "1.0" or "0.1.0", not the text "2"'),
        ("coordinator", None, "coordinator: must be an object {...}, not null"),
        ("coordinator", [], "coordinator: must be an object {...}, not a list [...]"),
        ("workers", {}, "workers: must be a list [...], not an object {...}"),
        ("model.nam", "x", "model.nam: unknown key"),
        ("model.torch_dtype", "x", 'model.torch_dtype: unknown key; it is called "dtype"'),
        ("model.dtype", "bf16", 'did you mean "bfloat16"?'),
        # transformers takes "owner/name" for a kernel of the hub: native code of somebody
        ("model.attn_implementation", "somebody/kernel", 'must be "eager", "sdpa", "flash_att'),
        ("model.quantization", "nf5", 'must be "nf4" or "int8", not the text "nf5"'),
        ("model.name_or_path", None, "model: give name_or_path or from_config, exactly"),
        ("model", {"from_config": {}}, 'from_config needs a "model_type"'),
        ("model", {"from_config": {"model_type": "llama"}}, "model.tokenizer: is needed"),
        ("adapter.r", 0, "adapter.r: must be at least 1, not 0"),
        ("adapter.lora_dropout", 1, "adapter.lora_dropout: must be less than 1.0, not 1"),
        ("adapter.loftq_config", LOFTQ, "LoraConfig.loftq_config is not supported here because"),
        ("adapter.target_modules", 3, "must be a text or a list [...], not 3"),
        ("adapter.target_modules", ["a", 3], "adapter.target_modules[1]: must be a text, not 3"),
        ("adapter.init_lora_weights", "pisa", 'true or false or "gaussian", "orthogonal", "pissa"'),
        ("data", {"max_length": 9}, "data.train: is missing"),
        ("data.train", [], "data.train: names no data"),
        ("data.train", "", "data.train: names no data"),
        ("data.max_length", 0, "data.max_length: must be at least 1, not 0"),
        ("data.activation_offloading", True, f"unknown key; it is called {OFFLOADING}"),
        ("training.gradient_checkpointing_kwargs", OFFLOAD, f'"offload" is called {OFFLOADING}'),
        ("data.max_seq_length", 9, 'data.max_seq_length: unknown key; it is called "max_length"'),
        ("data.packing", "yes", "data.packing: must be true or false"),
        ("data", {"train": "a", "padding_free": True, "pad_to_multiple_of": 8}, "remove pad_to"),
        ("training.learning_rat", 1, 'training.learning_rat: unknown key; did you mean "learning'),
        ("training.learning_rate", -1, "training.learning_rate: must be at least 0.0, not -1"),
        ("training.learning_rate", "1e-4", "must be a number, not the text"),
        ("training.learning_rate", True, "training.learning_rate: must be a number, not true"),
        ("training.per_device_train_batch_size", 0, "must be at least 1, not 0"),
        ("training.max_steps", 0, "training.max_steps: must be -1 (no limit) or at least 1"),
        ("training.save_steps", 2.5, "training.save_steps: must be a whole number of steps"),
        ("training.bf16", 1, "training.bf16: must be true or false, not 1"),
        ("training.fsdp", "x", "TrainingArguments.fsdp is not supported here because"),
        ("training.evaluation_strategy", "no", 'it is called "eval_strategy"'),
        ("training.log_level", "loud", 'training.log_level: "loud" is not one of DEBUG'),
        ("training.eval_steps", 5, "training.eval_steps: needs evaluation data; set data.eval"),
        ("training.eval_strategy", "epoch", "training.eval_strategy: needs evaluation data"),
        ("training.lr_scheduler_type", "reduce_lr_on_plateau", "depends on evaluation results"),
        ("training.seed", -1, "training.seed: must be at least 0, not -1"),
        ("training", {"bf16": True, "fp16": True}, "bf16 and fp16 exclude each other"),
        ("training", {"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_steps or warmup_ratio"),
        ("training", EPOCHS_AND_STEPS, 'eval_steps needs eval_strategy "steps"'),
        ("training.gradient_checkpointing", "yes", "gradient_checkpointing"),
        ("training.gradient_checkpointing", 1, "gradient_checkpointing"),
        ("training.loss_chunk_tokens", "all", "loss_chunk_tokens"),
        ("training.loss_chunk_tokens", 1, 'must be at least 2 or "auto", not 1'),
        ("training.label_smoothing_factor", -0.1, "training.label_smoothing_factor: "),
        ("training.torch_compile_mode", "reduce-overhead", "max-autotune-no-cudagraphs"),
        ("resume_step", "last", 'resume_step: must be "latest" or a whole number'),
        ("resume_step", -1, 'must be a step number, "latest" or null'),
        ("resume_step", True, 'resume_step: must be "latest" or a whole number, not true'),
    ],
)
def test_wrong_value_names_the_place_and_the_fix(path, value, expected):
    assert expected in message(changed(path, value))


def test_missing_values_are_named():
    text = message({"workers": []})
    assert "coordinator: is missing (The machine that drives the training)" in text
    assert "shard_plan: is missing (" in text


@pytest.mark.parametrize(
    ("fine", "path", "value", "expected"),
    [
        (
            {"workers[0].ip": "192.168.1.10"},
            *("workers[0].port", 9998),
            "workers[0].port: 192.168.1.10 port 9998 is that of the coordinator too",
        ),
        ({"workers[0].ip": "localhost"}, "workers[1].ip", "127.0.0.1", "is that of workers[0] too"),
        (QUANTISED, "adapter", None, "quantised weights cannot be trained"),
        (QUANTISED, "adapter.init_lora_weights", "pissa", REWRITES),
        (HALF, "adapter", None, "training.fp16: needs float32 weights"),
    ],
)
def test_a_value_that_others_exclude_is_refused(fine, path, value, expected):
    raw = FULL
    for setting in fine.items():
        raw = changed(*setting, raw)
    Config.from_dict(raw)
    assert expected in message(changed(path, value, raw))


def test_quantisation_goes_by_machine():
    raw = changed("model.quantization", "nf4", changed("workers[1].quantization", "none"))
    config = Config.from_dict(raw)
    assert [config.quantization(owner) for owner in ("local", 1, 2)] == ["nf4", "nf4", None]
    assert config.kinds == {"nf4": "embedding + layers 0-23", "none": "layers 24-31 + head"}
    held = config.held_by(2)
    assert held.model is not None
    assert held.model.quantization is None
    assert held.quantizes  # elsewhere, which decides the type of the adapter's weights
    assert held.with_changes(training={"seed": 1}).quantizes
    alike = Config.from_dict(changed("workers[1].quantization", "nf4", raw))
    assert alike.kinds == Config.from_dict(changed("model.quantization", "nf4")).kinds == "nf4"
    alone = changed("workers[1].quantization", "nf4")
    kinds = {"none": "embedding + layers 0-23", "nf4": "layers 24-31 + head"}
    assert Config.from_dict(alone).kinds == kinds
    assert "workers[1].quantization: quantised weights" in message({**alone, "adapter": None})
    random = {"from_config": {"model_type": "llama"}, "tokenizer": "t"}
    assert "workers[1].quantization: needs stored weights" in message({**alone, "model": random})
    assert 'must be "nf4", "int8" or "none"' in message(changed("workers[1].quantization", "fp4"))


def test_smoothed_labels_have_no_loss_of_routers():
    raw = changed("model.router_aux_loss_coef", 0.1, changed("training.label_smoothing_factor", 1))
    assert "model.router_aux_loss_coef: is no part of the loss with" in message(raw)
    Config.from_dict(changed("model.router_aux_loss_coef", 0.0, raw))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ([], "shard_plan: must not be empty"),
        ([(1, 0, 8), (2, 8, 32)], 'shard_plan[0].id: must be "local"'),
        ([("local", 0, 8), (1, 10, 24), (2, 24, 32)], "is 10, so nobody holds layers 8-9"),
        ([("local", 0, 8), (1, 9, 24), (2, 24, 32)], "nobody holds layer 8; start it at 8"),
        ([("local", 2, 8), (1, 8, 24), (2, 24, 32)], "the first entry must start at 0"),
        ([("local", 0, 8), (1, 6, 24), (2, 24, 32)], "already reach 8; entries are in model order"),
        ([("local", 0, 8), (2, 24, 32), (1, 8, 24)], "nobody holds layers 8-23"),
        ([("local", 0, 8), (1, 24, 8), (2, 8, 32)], "shard_plan[1]: start 24 is after end 8"),
        ([("local", 0, 8), (1, 8, 8), (2, 8, 32)], "shard_plan[1]: holds no layer"),
        ([("local", 0, 0), (1, 0, 0), (2, 0, 0)], "covers no layer"),
        ([("local", 0, 8), (1, 8, 16), (2, 16, 24), (3, 24, 32)], "[3].id: 3 is not a work"),
        ([("local", 0, 8), ("1", 8, 16), (1, 16, 24), (2, 24, 32)], '"1" is written 1 in workers'),
    ],
)
def test_wrong_plan_is_a_plan_error_with_the_fix(plan, expected):
    raw = {**SEED, "shard_plan": [{"id": i, "start": s, "end": e} for i, s, e in plan]}
    assert expected in message(raw, PlanError)


def test_a_worker_without_an_entry_takes_no_part_and_is_noted():
    raw = {**SEED, "shard_plan": [{"id": "local", "start": 0, "end": 8}]}
    raw["shard_plan"].append({"id": 1, "start": 8, "end": 32})
    config = Config.from_dict(raw)
    assert [worker.id for worker in config.planned_workers] == [1]
    assert "worker 2 has no entry in shard_plan and takes no part" in config.warnings()


def test_a_plan_lists_owners_and_contents_of_stages():
    plan = Config.from_dict(changed("shard_plan[2].id", 1)).plan
    assert plan.owners == ("local", 1)
    assert [stage.index for stage in plan.of(1)] == [1, 2]
    assert plan.num_layers == 32
    assert [stage.process for stage in plan.stages] == ["coordinator", "worker 1", "worker 1"]
    assert plan.stages[0].contents.startswith("embedding + layers 0-")
    assert plan.stages[2].contents.endswith("-31 + head")


def test_changes_are_validated_like_a_file():
    config = Config.from_dict(FULL, "/base")
    other = config.with_changes(training={"max_steps": 7}, data=None)
    assert (other.training.max_steps, other.data, other.base_dir) == (7, None, config.base_dir)
    assert other.training.seed == config.training.seed
    with pytest.raises(ConfigError, match=r"training.max_steps: must be -1 \(no limit\)"):
        config.with_changes(training={"max_steps": 0})
    with pytest.raises(PlanError, match="already reach 32"):
        config.with_changes(shard_plan=[*config.shard_plan, config.shard_plan[0]])


def test_is_last_must_agree_with_the_order():
    raw = changed("shard_plan[0].is_last", True)
    assert "shard_plan[0].is_last: is true, but only the last entry" in message(raw, PlanError)
    raw = changed("shard_plan[2].is_last", False)
    assert "shard_plan[2].is_last: is false" in message(raw, PlanError)


def test_streamed_layers_are_frozen_and_in_the_stage():
    wrong = message(changed("shard_plan[1].offload", -1))
    assert 'shard_plan[1].offload: must be at least 0 or "auto", not -1' in wrong
    raw = {**changed("shard_plan[1].offload", 17), "adapter": {"r": 2}}
    layers = raw["shard_plan"][1]["end"] - raw["shard_plan"][1]["start"]
    assert "shard_plan[1].offload: is 17, but the stage has 16 layers" in message(raw, PlanError)
    raw["shard_plan"][1]["offload"] = layers
    assert Config.from_dict(raw).uses_host_memory(1)
    for name, value in (("bias", "all"), ("init_lora_weights", "pissa")):
        raw["adapter"] = {"r": 2, name: value}
        assert f"only frozen layers can stay in host memory, and adapter.{name}" in message(raw)
    raw["adapter"] = None
    assert "shard_plan[1].offload: only frozen layers can stay in host memory" in message(raw)
    raw["shard_plan"][1] |= {"offload": 0, "offload_optimizer": True}
    assert Config.from_dict(raw).uses_host_memory(1)


def test_streaming_that_saves_no_memory_is_warned_of():
    raw = {**copy.deepcopy(FULL), "adapter": {"r": 2}}
    for offload, said in ((3, ["shard_plan[1].offload 3 saves no memory"]), (4, []), ("auto", [])):
        raw["shard_plan"][1]["offload"] = offload
        lines = [line for line in Config.from_dict(raw).warnings() if "offload" in line]
        assert len(lines) == len(said)
        assert all(line.startswith(text) for line, text in zip(lines, said, strict=True))


@needs("chains", "pictures")
def test_inputs_of_a_chain_stay():
    raw = changed("training.activation_offloading", True)
    assert Config.from_dict(raw).training.activation_offloading
    raw["training"]["objective"] = "image-classification"
    assert "training.activation_offloading: is for models of texts" in message(raw)


def test_plan_is_compared_with_the_models_layers():
    config = Config.from_dict(SEED)
    config.plan.covers(32)
    with pytest.raises(PlanError, match=r"covers 32 layers, but the model has 36"):
        config.plan.covers(36)
    for layers, wrong in ((28, r"shard_plan\[2\].end is 32"), (8, r"shard_plan\[1\].end is 24")):
        with pytest.raises(PlanError, match=f"{wrong}.*but the model has {layers}"):
            config.plan.covers(layers)


def test_all_problems_are_listed_at_once():
    raw = changed("training.max_steps", "3")
    raw["shard_plan"][1]["start"] = 9
    raw["workers"][0]["ip"] = "http://x"
    raw["model"]["nam"] = 1
    text = message(raw)
    for part in ("training.max_steps", "workers[0].ip", "model.nam"):
        assert part in text
    raw["workers"][0]["ip"] = "10.0.0.1"
    assert "shard_plan[1].start: is 9, so nobody holds layer 8" in message(raw)


def test_many_problems_are_all_listed():
    raw = changed("training", {f"unknown_{i}": 1 for i in range(50)})
    text = message(raw)
    assert "has 50 problems" in text
    assert [f"unknown_{i}:" in text for i in range(50)] == [True] * 50


def test_long_wrong_values_are_shortened():
    assert len(message(changed("training.optim_args", ["x" * 10_000]))) < 200
    assert len(message(changed("model.dtype", "x" * 10_000))) < 300


def test_a_text_in_place_of_a_section_is_refused():
    said = message({**FULL, "adapter": "lora"})
    assert 'adapter: must be an object {...}, not the text "lora"' in said


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("adapter.target_modules", "*q_proj", "nothing to repeat at position 0"),
        ("adapter.exclude_modules", "mlp(", "unterminated subpattern at position 3"),
        ("adapter.rank_pattern", {"q_proj": 4, "a)(": 4}, "unbalanced parenthesis at position 1"),
        ("adapter.alpha_pattern", {"[a": 4}, "unterminated character set at position 0"),
        ("adapter.modules_to_save", ["lm_head", "(x"], "unterminated subpattern at position 0"),
        ("adapter.layers_pattern", "l[", "unterminated character set at position 1"),
        ("adapter.layers_pattern", ["layers", "(?P<idx>h)"], "redefinition of group name"),
        ("adapter.target_modules", "a{3,1}", "min repeat greater than max repeat at position 2"),
        ("adapter.target_modules", "(?<=a+)q", "look-behind requires fixed-width pattern"),
    ],
)
def test_a_text_that_is_no_expression_is_named_with_the_place(path, value, said):
    found = message({**FULL, "adapter": {path.partition(".")[2]: value}})
    assert said in found
    assert path in found


def test_lists_of_plain_names_are_no_expressions():
    adapter = {"target_modules": ["a("], "exclude_modules": ["*"], "rank_pattern": {r"a\.\d": 2}}
    assert Config.from_dict({**FULL, "adapter": adapter}).adapter is not None
    assert Config.from_dict({**FULL, "adapter": {"target_modules": "All-Linear"}}).adapter


def defaults() -> Iterator[tuple[str, str, Any]]:
    """What the libraries themselves say is their value where nothing is said."""
    schemas = ((TrainingArguments, "training"), (SFTConfig, "data"), (LoraConfig, "adapter"))
    for owner, section in schemas:
        own = aliases.unsupported(whole_schema(Config))[section]
        for field in dataclasses.fields(owner):
            made = field.default_factory
            default = made() if made is not dataclasses.MISSING else field.default
            default = getattr(default, "value", default)
            if field.name in own and isinstance(default, (bool, int, float, str, list, NoneType)):
                yield section, field.name, default


def test_library_defaults_of_unsupported_settings_pass_with_a_line():
    found = list(defaults())
    assert len(found) > 82
    for section, key, default in found:
        raw = copy.deepcopy(FULL) | {"adapter": {"r": 8}}
        raw[section][key] = default
        config = Config.from_dict(raw)
        said = [line for line in config.warnings() if "is left out" in line]
        assert [line.startswith(f"{section}.{key} ") for line in said] == [True]
        assert config.with_changes(training={"seed": 1}).warnings() == config.warnings()
        raw[section][key] = "another value"
        assert f"{section}.{key}: " in message(raw)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("training", {"packing": False, "hub_always_push": False, "deepspeed": None, "fsdp": ""}),
        ("training", {"ddp_find_unused_parameters": False, "fp16_full_eval": False}),
        ("training", {"group_by_length": False, "do_train": True, "save_safetensors": True}),
        ("training", {"fsdp_config": {}, "hub_token": None, "dataloader_num_workers": 0}),
        ("training", {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("data", {"sample_packing": False, "eval_sample_packing": None}),
        ("data", {"trust_remote_code": False, "activation_offloading": False}),
        ("model", {"load_in_4bit": False, "load_in_8bit": False, "trust_remote_code": False}),
        ("adapter", {"peft_type": "LORA", "task_type": "CAUSAL_LM", "peft_use_dora": False}),
        ("", {"wandb_project": "", "deepspeed": None, "fsdp": [], "strict": False}),
    ],
)
def test_harmless_values_of_other_tools_pass_with_a_line_each(section, values):
    raw = copy.deepcopy(FULL)
    (raw.setdefault(section, {}) if section else raw).update(values)
    lines = [line for line in Config.from_dict(raw).warnings() if "is left out" in line]
    assert len(lines) == len(values)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.packing", True),
        ("training.hub_always_push", True),
        ("training.hub_strategy", "every_save"),
        ("training.deepspeed", "ds.json"),
        ("training.save_safetensors", False),
        ("training.gradient_checkpointing_kwargs", {"use_reentrant": True}),
        ("training.dataloader_num_workers", 4),
        ("training.dataloader_num_workers", 3),
        ("training.average_tokens_across_devices", False),
        ("training.shuffle", False),
        ("data.train_on_inputs", False),
        ("training.no_such_name", False),
        ("model.load_in_4bit", True),
        ("adapter.peft_type", "IA3"),
    ],
)
def test_other_values_of_other_tools_are_refused_by_name(path, value):
    assert f"{path}: " in message(changed(path, value))


@needs("reporting")
def test_report_to_takes_a_name_or_a_list():
    both = ("tensorboard", "wandb")
    for value, meant in (([], ()), ("wandb", ("wandb",)), (["none"], ()), (list(both), both)):
        raw = {**FULL, "training": {"report_to": value}}
        assert Config.from_dict(raw).training.report_to == meant


def test_report_to_takes_names_of_the_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    raw = {**FULL, "training": {"report_to": ["tensorbord"]}}
    said = message(raw)
    assert 'training.report_to[0]: must be "all", ' in said
    assert 'not the text "tensorbord"; did you mean "tensorboard"?' in said
    registry.register("reporters", "tensorbord", None)
    assert Config.from_dict(raw).training.report_to == ("tensorbord",)
    training = json_schema()["$defs"]["TrainingConfig"]["properties"]
    assert {"all", "none", "tensorboard", "tensorbord"} <= {*training["report_to"]["items"]["enum"]}


def test_a_reporter_of_an_absent_extra_is_said_with_its_name(monkeypatch):
    kept = {**registry._tables(), "reporters": {}}
    monkeypatch.setattr(registry, "_tables", lambda: kept)
    said = message({**FULL, "training": {"report_to": "wandb"}})
    assert "report_to: \"wandb\" needs the extra 'reporting', which this installation" in said


# -- the file -------------------------------------------------------------------------------------


def load(tmp_path: Path, content: str | bytes) -> Config:
    file = tmp_path / "hetero_config.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_config(file)


def test_file_that_cannot_be_read_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"is a directory(?s:.*)name a file in it"):
        load_config(tmp_path)


def test_message_of_one_problem_starts_with_the_file(tmp_path):
    raw = changed("training.lr", 1)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, json.dumps(raw))
    place = f"{tmp_path / 'hetero_config.json'}: training.lr"
    assert str(caught.value) == f'{place}: unknown key; it is called "learning_rate"'


def test_overrides_replace_settings(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(FULL), encoding="utf-8")
    settings = ["training.learning_rate=1e-4", "workers[1].port=7", "data.train=other.jsonl"]
    config = load_config(file, [*settings, "adapter=null"])
    assert config.training.learning_rate == 1e-4
    assert config.workers[1].port == 7
    assert config.data is not None
    assert config.data.train == "other.jsonl"
    assert config.adapter is None


def test_worker_without_a_port_dials_and_a_name_will_do():
    raw = changed("workers[0]", {"id": 1, "hostname": "laptop"})
    worker = Config.from_dict(raw).workers[0]
    assert (worker.dials, worker.ip, worker.address) == (True, "laptop", "laptop (dials)")
    assert "workers[0].ip: is missing" in message(changed("workers[0]", {"id": 1}))
    raw["coordinator"]["ip"] = "0.0.0.0"
    assert "coordinator.ip: 0.0.0.0 is not an address to dial" in message(raw)


@pytest.mark.parametrize("setting", ["x", "=1", "workers[9].port=1", "workers.port=1", "[0]=1"])
def test_override_that_fits_nowhere_is_refused(setting):
    with pytest.raises(ConfigError, match="--set"):
        apply_override(copy.deepcopy(FULL), setting)


# -- the rest -------------------------------------------------------------------------------------


def test_worker_is_found_by_number_or_text():
    config = Config.from_dict(SEED)
    assert config.worker("2").id == 2
    with pytest.raises(ConfigError, match=r"no worker 3; the configuration has: 1, 2"):
        config.worker(3)


def test_require_names_the_missing_sections():
    with pytest.raises(ConfigError, match='no "model" and "data" section'):
        Config.from_dict(SEED).require("model", "data")


@needs("reporting")
def test_warnings_name_settings_that_are_probably_mistakes():
    config = Config.from_dict(changed("data.eval", "e.jsonl"))
    assert any("data.eval has no effect" in text for text in config.warnings())
    assert any("gradient_accumulation_steps" in text for text in config.warnings())
    unused = Config.from_dict(changed("training.hub_model_id", "me/result"))
    assert any("hub_model_id has no effect" in text for text in unused.warnings())
    quiet = changed("training.gradient_accumulation_steps", 8)
    assert Config.from_dict(quiet).warnings() == ()


@pytest.mark.parametrize(
    ("training", "total", "expected"),
    [
        ({"warmup_steps": 10}, 100, 10),
        ({"warmup_steps": 0.031}, 100, 4),
        ({"warmup_ratio": 0.1}, 101, 11),
        ({}, 100, 0),
    ],
)
def test_warmup_is_counted_as_in_transformers(training, total, expected):
    assert TrainingConfig(**training).warmup(total) == expected


def test_evaluation_follows_eval_steps():
    assert TrainingConfig().evaluation == "no"
    assert TrainingConfig(eval_steps=5).evaluation == "steps"
    assert TrainingConfig(eval_strategy="epoch").evaluation == "epoch"


def test_config_cannot_be_changed():
    config = Config.from_dict(SEED)
    with pytest.raises(ValueError, match="frozen"):
        config.training = TrainingConfig()  # type: ignore[misc]


def test_every_field_is_described():
    schema = json_schema()
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        for name, field in section["properties"].items():
            assert field.get("description"), name


def test_training_names_mean_the_same_as_in_transformers():
    theirs = {f.name: f for f in dataclasses.fields(TrainingArguments)}
    ours = TrainingConfig.model_fields
    differs = {
        name
        for name in set(ours) & set(theirs)
        if ours[name].get_default(call_default_factory=True) != theirs[name].default
    }
    documented = {"output_dir", "optim", "logging_steps", "report_to", "log_level", "eval_strategy"}
    documented |= {"hub_strategy"}
    empty = {"lr_scheduler_kwargs", "gradient_checkpointing"}  # {} and false for null
    assert differs <= documented | empty


def test_adapter_names_mean_the_same_as_in_peft():
    theirs = {f.name: f.default for f in dataclasses.fields(LoraConfig)}
    ours = AdapterConfig.model_fields
    for name in set(ours) & theirs.keys() - {"rank_pattern", "alpha_pattern"}:
        assert ours[name].get_default() == theirs[name], name


def test_sections_can_be_built_in_python():
    assert ModelConfig(name_or_path="x").dtype == "auto"
    assert AdapterConfig(r=4, target_modules=("q_proj",)).r == 4
    assert DataConfig(train="x").max_length == 1024


@whole
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("adapter.rank", 'unknown key; it is called "r"'),
        ("adapter.lora_r", 'unknown key; it is called "r"'),
        ("training.lora_rank", "unknown key; it is called adapter.r"),
        ("adapter.alpha", 'unknown key; it is called "lora_alpha"'),
        (
            "data.interleave",
            "there is no such setting: data.train has a list of sources, each with",
        ),
        ("training.epochs", 'it is called "num_train_epochs"'),
        ("training.num_epochs", 'it is called "num_train_epochs"'),
        ("epochs", "it is called training.num_train_epochs"),
        ("training.lr", 'it is called "learning_rate"'),
        ("training.batch_size", 'it is called "per_device_train_batch_size"'),
        ("training.max_seq_length", "it is called data.max_length"),
        ("max_seq_length", "it is called data.max_length"),
        ("training.max_length", 'unknown key here; it belongs in "data"'),
        ("training.resume_from_checkpoint", 'it is called resume_step ("latest" or a number)'),
        ("model.load_in_4bit", 'it is called model.quantization, with the value "nf4"'),
        ("model.name", 'it is called "name_or_path"'),
        ("workers[0].host", 'it is called "ip"'),
        ("workers[0].name", 'it is called "id"'),
        ("lora", 'it is called "adapter"'),
        ("shard_plan[1].owner", 'it is called "id"'),
        ("push_to_hub", 'unknown key here; it belongs in "training"'),
        ("training.hub_always_push", "is not supported here because one upload runs at a time"),
        ("training.use_cache", "TrainingArguments.use_cache is not supported here"),
        ("adapter.kasa_config", "LoraConfig.kasa_config is not supported here because only LoRA"),
        ("training.warmstart", "unknown key; docs/configuration.md lists all settings"),
    ],
)
def test_an_unknown_setting_is_refused_with_its_name_here_or_a_reason(path, expected):
    assert expected in message(changed(path, 1))


@whole
def test_names_elsewhere_lead_to_one_setting_that_exists():
    told = [name for names in aliases.called(whole_schema(Config)).values() for name in names]
    machines = {"host", "address", "addr", "ip_address", "name", "worker_id", "owner", "worker"}
    machines |= {"threads", "cpu_threads", "omp_num_threads", "gpu", "cuda"}
    assert {name for name in told if told.count(name) > 1} <= machines
    assert len(aliases.called(whole_schema(Config))) > 70
    paths = {path for path, _, _ in settings(whole_schema(Config))}
    for here in aliases.settings()["instead"]:
        assert re.split(r"[ ,]", here)[0] in paths
    assert not {name for name in told if "." in name} & paths


@whole
@pytest.mark.parametrize(
    "name",
    [
        "hetero_config.json",
        "examples/island.json",
        "examples/llama8b_4bit.json",
        "examples/own_model.json",
        "examples/resnet.json",
        "examples/slurm.json",
        "examples/three_machines.json",
        "examples/two_cards_and_mac.json",
        "examples/vit.json",
    ],
)
def test_shipped_configuration_is_valid(name):
    config = load_config(ROOT / name)
    config.require("model", "data")
    assert config.warnings() == ()


def test_every_json_configuration_of_the_repository_is_checked_here():
    shipped = {
        str(file.relative_to(ROOT).as_posix())
        for folder in (ROOT, ROOT / "examples")
        for file in folder.glob("*.json")
        if "shard_plan" in file.read_text(encoding="utf-8")
    }
    marks = test_shipped_configuration_is_valid.pytestmark  # type: ignore[attr-defined]
    assert shipped == set(marks[0].args[1])


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    return generate


@whole
def test_documentation_is_up_to_date(generate):
    shown = generate.TARGET.read_text(encoding="utf-8")
    assert generate.page() == shown, "run: python docs/generate.py"


@whole
def test_every_name_of_the_installed_transformers_peft_and_trl_is_listed(generate):
    listed = json.loads(aliases.FILE.read_text(encoding="utf-8"))
    for section, names in generate.alias_names().items():
        assert set(names) <= set(listed[section]), "run: python docs/generate.py"


def test_a_stage_may_have_its_own_checkpointing():
    raw = changed("training.gradient_checkpointing", "auto")
    raw["shard_plan"][1]["gradient_checkpointing"] = False
    config = Config.from_dict(raw)
    assert [config.checkpointing(k) for k in range(3)] == ["auto", False, "auto"]
    assert Config.from_dict(config.to_dict()) == config


def test_naming_a_backend_or_a_mode_compiles_as_in_transformers():
    assert not TrainingConfig().compiles
    assert TrainingConfig(torch_compile=True).compiles
    assert TrainingConfig(torch_compile_backend="aot_eager").compiles
    assert TrainingConfig(torch_compile_mode="default").compiles


def test_a_plan_may_be_left_to_the_run():
    config = Config.from_dict({**SEED, "shard_plan": "auto"})
    assert not config.is_planned
    assert config.planned_workers == config.workers
    assert config.warnings() == ()
    with pytest.raises(PlanError, match='shard_plan is "auto"') as raised:
        _ = config.plan
    assert "hetero plan --measure" in str(raised.value.hint)
    assert config.to_dict()["shard_plan"] == "auto"
    assert Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    planned = config.with_changes(shard_plan=SEED["shard_plan"])
    assert planned.to_dict() == Config.from_dict(SEED).to_dict()


def test_the_schema_of_a_plan_is_entries_or_auto():
    entries, auto = json_schema()["properties"]["shard_plan"]["anyOf"]
    assert (entries["type"], entries["minItems"], auto["const"]) == ("array", 1, "auto")
    said = message({**SEED, "shard_plan": "automatic"})
    assert said.startswith("configuration: shard_plan: must")


BEST = {"load_best_model_at_end": True}
MULTIPLE = "save_steps that is a multiple of eval_steps, but they are"


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (BEST, "load_best_model_at_end needs evaluations"),
        ({"early_stopping_patience": 2}, "early_stopping_patience needs evaluations"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model needs evaluations"),
        (
            {**BEST, "eval_strategy": "epoch"},
            'eval_strategy is "epoch" and save_strategy "steps"; set both alike',
        ),
        ({**BEST, "eval_steps": 4, "save_steps": 6}, f"{MULTIPLE} 6 and 4"),
        ({**BEST, "eval_steps": 0.1, "save_steps": 10}, f"{MULTIPLE} 10 and 0.1"),
    ],
)
def test_a_best_model_needs_what_the_trainer_asks_for(training, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainingConfig.model_validate(training)


def test_a_metric_that_no_evaluation_gives_is_refused_with_those_that_are_given():
    def config(**training: Any) -> Config:
        training = {"eval_strategy": "epoch", **training}
        return Config.from_dict({**SEED, "data": {"train": "a", "eval": "b"}, "training": training})

    for name in ("loss", "eval_loss", "token_loss", "perplexity"):
        config(metric_for_best_model=name).check_metric()
    with pytest.raises(ConfigError, match='"entropy", which no evaluation gives') as raised:
        config(metric_for_best_model="entropy").check_metric()
    assert "loss, token_loss, perplexity; training.token_metrics gives more" in str(raised.value)
    config(metric_for_best_model="entropy", token_metrics=True).check_metric()


def test_shares_of_the_steps_may_be_multiples():
    training = {"load_best_model_at_end": True, "eval_steps": 0.1, "save_steps": 0.3}
    assert TrainingConfig.model_validate(training).metric == "loss"
