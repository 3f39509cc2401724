"""Configurations of other trainers: each key is taken, changed or explained, and the result is one
of this project. The inputs have the keys of these projects' own examples."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
import trl
import yaml

from hetero_framework.cli import main
from hetero_framework.config import Config, load_config
from hetero_framework.extras.convert.commands.convert import read_recipe
from hetero_framework.extras.convert.convert import STATUSES
from hetero_framework.extras.preferences.pair_losses import PAIR_LOSSES, register_pair_loss
from tests.extras.preferences.test_preference_runs import trl_classes

FOREIGN = Path(__file__).with_name("foreign")
# What has to be done by hand before such a run can begin: data and templates to be written anew.
BY_HAND: dict[str, list[str]] = {
    **{f"axolotl_{name}": [] for name in ("qlora.yml", "chat.yml", "full.yaml", "text.yml")},
    "axolotl_dpo.yml": ["datasets[0].type"],
    **{f"llama_factory_{name}.yaml": ["dataset"] for name in ("qlora", "kto")},
    **{
        f"llama_factory_{name}.yaml": ["dataset", "max_samples"]
        for name in ("lora", "full", "pretrain", "dpo")
    },
    **{f"trl_{name}.yaml": [] for name in ("full", "lora", "dpo")},
    **{f"trl_{name}.json": [] for name in ("classes", "kto")},
    "trl_recipe.yaml": ["datasets.split", "chat_template_path"],
}
KEPT = ("taken", "changed", "no effect here")
Report = dict[str, Any]


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Converts a text or a file of foreign/: the report, and the configuration."""
    folder = shutil.copytree(FOREIGN, tmp_path / "there")
    monkeypatch.chdir(folder)

    def run(name: str, text: str | None = None, *options: str) -> tuple[Report, Config]:
        if text is not None:
            (folder / name).write_text(text)
        command = ["convert", name, "--json", "--overwrite", "--output", str(tmp_path / "c.json")]
        assert main([*command, *options]) == 0
        report = json.loads(capsys.readouterr().out)
        return report, load_config(tmp_path / "c.json")

    return run


def rows(report: Report) -> dict[str, Report]:
    return {row["key"]: row for row in report["keys"]}


def test_the_inputs_are_all_named():
    assert {file.name for file in FOREIGN.iterdir()} == {*BY_HAND}


@pytest.mark.parametrize("name", BY_HAND)
def test_every_key_is_taken_changed_or_explained(name, convert):
    report, config = convert(name)
    config.require("model", "data")
    found = rows(report)
    given, _ = read_recipe(FOREIGN / name)
    for key in ("datasets", "test_datasets"):
        for number, entry in enumerate(given.pop(key, ())):
            given |= {f"{key}[{number}].{inner}": value for inner, value in entry.items()}
    special = given.pop("special_tokens", {})
    given |= {f"special_tokens.{inner}": value for inner, value in special.items()}
    assert given.keys() <= found.keys()
    assert {row["status"] for row in found.values()} <= set(STATUSES) - {"unknown"}
    for row in found.values():
        assert row["to"] or row["why"], row
        assert row["why"] or row["status"] == "taken", row
    assert [key for key, row in found.items() if row["status"] == "to do by hand"] == BY_HAND[name]
    assert report["program"].lower().startswith(name.partition("_")[0])


MEANINGS = yaml.safe_load(Path(__file__).with_name("meanings.yaml").read_text())
AXOLOTL = "base_model: m\nmicro_batch_size: 1\nadapter: lora\nlora_r: 4\n"
BEGIN = {
    "a.yml": AXOLOTL + "datasets: [{path: train.jsonl, type: completion}]\n",
    "l.yaml": "stage: sft\nmodel_name_or_path: m\ndataset: lora_one\n",
    "t.yaml": "model_name_or_path: m\ndataset_name: t.jsonl\n",
}


@pytest.mark.parametrize("case", MEANINGS, ids=lambda case: case["file"])
def test_settings_mean_the_same(case, convert):
    text = case.get("text", "").replace("$", BEGIN.get(case["file"], "")) or None
    report, config = convert(case["file"], text, *case.get("options", ()))
    made, found = config.to_dict(), rows(report)
    for section, expected in case.get("becomes", {}).items():
        settings = made[section] and {name: made[section][name] for name in expected or ()}
        assert settings == expected
    for key, expected in case.get("rows", {}).items():
        assert found[key]["to" if isinstance(expected, dict) else "status"] == expected
    assert "hf_abc" not in json.dumps(report)
    if text and "train.jsonl" in text:  # called as the example, and yet no name to be replaced
        assert "to do by hand" not in {row["status"] for row in report["keys"]}


@pytest.mark.parametrize("key", ["datasets", "test_datasets"])
def test_what_differs_between_sets_is_left_to_the_user(key, convert):
    sets = "[{path: o/a, type: alpaca, name: x}, {path: o/b, type: alpaca, name: y}]"
    train = "datasets: [{path: o/c}]\n" * (key != "datasets")
    report, config = convert("a.yml", f"{AXOLOTL}{train}{key}: {sets}\n")
    row = rows(report)[f"{key}.name"]
    assert (row["status"], row["value"]) == ("to do by hand", ["x", "y"])
    assert getattr(config.data, "eval" if "test" in key else "train") == ("o/a", "o/b")
    assert config.data.dataset_config is None


def test_mixtures_of_llama_factory_are_left_to_the_user(convert):
    text = "model_name_or_path: m\nstage: sft\ndataset: a, b\nmix_strategy: interleave_over\n"
    report, config = convert("l.yaml", f"{text}interleave_probs: 0.3,0.7\nval_size: 20\n")
    for key in ("dataset", "mix_strategy", "interleave_probs"):
        assert rows(report)[key]["status"] == "to do by hand"
    assert "dataset_info.json" in rows(report)["dataset"]["why"]
    assert (config.data.train, config.data.val_set_size) == (("a", "b"), 20)


def test_streams_need_a_number_of_steps(convert):
    text = "model_name_or_path: m\ndataset_name: d\nstreaming: true\npacking: true\n"
    report, config = convert("t.yaml", f"{text}max_steps: 20\nlearning_rate: 1e-4\n")
    assert config.data.streaming
    assert not config.data.packing
    assert rows(report)["packing"]["status"] == "cannot be had"
    report, config = convert("t.yaml", f"{text}learning_rate: 1e-4\n")
    assert config.data.packing
    assert not config.data.streaming


def defaults_of(cls: type) -> dict[str, Any]:
    return {
        f.name: f.default_factory() if callable(f.default_factory) else f.default
        for f in dataclasses.fields(cls)
    }


def test_defaults_are_those_of_the_installed_trl(convert):
    report, config = convert("t.yaml", BEGIN["t.yaml"] + "use_peft: true\n")
    ours = config.to_dict()
    theirs = defaults_of(trl.SFTConfig) | {"bf16": True, "pad_to_multiple_of": None}
    ours["training"] |= {"eval_strategy": config.training.evaluation, "log_level": "passive"}
    ours["training"]["lr_scheduler_kwargs"] = theirs["lr_scheduler_kwargs"]
    theirs["output_dir"] = ours["training"]["output_dir"]
    theirs["hub_strategy"] = "end"  # every_save is refused
    theirs["loss_type"] = None  # nll is what is done anyway
    ours["training"]["report_to"] = ours["training"]["report_to"] or "none"
    for section in ("data", "training"):
        shared = theirs.keys() & ours[section].keys()
        assert {name: ours[section][name] for name in shared} == {n: theirs[n] for n in shared}
    of_model = defaults_of(trl.ModelConfig)
    assert ours["model"]["dtype"] == of_model["dtype"]
    of_model["r"] = of_model["lora_r"]
    for name in ("r", "lora_alpha", "lora_dropout"):
        assert ours["adapter"][name] == of_model[name]
    assert report["defaults"]["training.learning_rate"] == 2e-5


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:This class will be removed:FutureWarning")
@pytest.mark.parametrize("objective", ["dpo", "orpo", "cpo", "kto", "reward"])
def test_whole_classes_of_preferences_are_read(objective, convert, tmp_path):
    cls: Any = trl.RewardConfig if objective == "reward" else trl_classes(objective)[1]
    fields = cls(str(tmp_path), use_cpu=True, bf16=False, disable_tqdm=False).to_dict()
    if objective == "reward":
        fields |= {"beta": 0.1, "center_rewards_coefficient": 0.01}
    options = ("--model", "org/m", "--data", "rows.jsonl")
    report, config = convert("c.json", json.dumps({cls.__name__: fields}, default=list), *options)
    training = config.training
    assert (training.objective, training.beta) == (objective, fields["beta"])
    theirs = fields.get("loss_type", "sigmoid")
    if objective == "reward":
        assert (training.center_rewards_coefficient, training.learning_rate) == (0.01, 1e-4)
        assert config.data.max_length == 1024
    else:
        assert training.losses == ((theirs,) if isinstance(theirs, str) else tuple(theirs))
    lost = {row["key"] for row in report["keys"] if row["status"] not in KEPT}
    assert lost <= {"use_cpu", "accelerator_config", "hub_token"}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_whole_classes_are_read(convert):
    """As to_dict() of these writes them: every field is there."""
    sft = trl.SFTConfig(output_dir="out", use_cpu=True, bf16=False, disable_tqdm=False)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    classes = {"SFTConfig": sft.to_dict(), "LoraConfig": lora.to_dict()}
    for fields in classes.values():
        fields.pop("revision", None)
    text = json.dumps(classes, default=lambda value: sorted(value))
    report, config = convert("c.json", text, "--model", "org/m", "--data", "rows.jsonl")
    assert (config.model.name_or_path, config.data.train) == ("org/m", "rows.jsonl")
    assert config.adapter.r == 4
    lost = {row["key"] for row in report["keys"] if row["status"] not in KEPT}
    assert lost <= {"use_cpu", "accelerator_config", "runtime_config", "hub_token", "peft_version"}


def test_machines_come_from_options(convert):
    _, config = convert("axolotl_qlora.yml", None, "--worker", "127.0.0.1:9200:cpu")
    assert [(w.ip, w.port, w.device) for w in config.workers] == [("127.0.0.1", 9200, "cpu")]
    assert config.quantization(1) is not None or config.workers[0].quantization == "none"
    assert not config.is_planned
    machines = ("--worker", "10.0.0.5", "--coordinator", "10.0.0.4")
    _, config = convert("trl_full.yaml", None, *machines)  # what it says of keys is not in the JSON
    assert config.coordinator.ip == "10.0.0.4"


def test_the_report_is_readable(convert, capsys, tmp_path):
    convert("trl_recipe.yaml")
    assert main(["convert", "trl_recipe.yaml", "--overwrite", "-o", str(tmp_path / "c.json")]) == 0
    said = capsys.readouterr().out
    for text in (
        "  learning_rate 4e-05 -> training.learning_rate\n",
        "its defaults, which differ from those here:",
        '  report_to ["wandb"] -> training.report_to\n',
        "to do by hand:",
        "next: hetero check --config",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yml", "base_model: m\nrl: grpo\n", 'rl: "grpo" of axolotl is not done here'),
        ("a.yml", "base_model: m\nrl: dpo\ndpo_norm_loss: true\n", "sigmoid_norm"),
        ("a.yaml", "stage: dpo\ntemplate: x\npref_loss: kto_pair\n", "orpo and simpo are"),
        ("a.yaml", "stage: dpo\ntemplate: x\npref_bco_weight: 0.5\n", "running mean"),
        ("a.yml", "trl: dpo\nloss_type: aot\n", "sorts the pairs"),
        ("a.yml", "trl: dpo\nloss_type: [sigmoid, aot]\n", "sorts the pairs"),
        ("a.yml", "trl: dpo\nloss_type: ipo\nsync_ref_model: true\n", "the reference stays"),
        ("a.yml", "base_model: m\nadapter: llama-adapter\n", "only LoRA"),
        ("a.yaml", "stage: ppo\ntemplate: x\n", "TRL trains it"),
        ("a.yaml", "stage: sft\nfinetuning_type: freeze\n", "LoRA or all weights"),
        ("a.yml", "trl: grpo\nloss_type: ipo\n", 'trl: "grpo" of TRL is not done here'),
        ("a.txt", "trl dpo --model_name_or_path m --loss_type sigmoid aot\n", "sorts the pairs"),
        ("a.txt", "trl grpo --model_name_or_path m\n", 'trl: "grpo" of TRL is not done here'),
        ("a.txt", "trl sft --eos_token 'x\n", "has no end"),
        ("a.txt", "echo hello\n", "nor one command line of TRL"),
        ("a.txt", "M=m\ntrl sft --model_name_or_path $M\n", "nor one command line of TRL"),
        ("a.txt", "trl sft --model_name_or_path m > log.txt\n", "nor one command line of TRL"),
        ("a.txt", "trl sft $1\n", "nor one command line of TRL"),
        ("a.txt", "trl sft now --seed 1\n", "now stands where an option"),
        ("a.txt", "trl sft --seed 1 --config no.yaml\n", "cannot read"),
        ("a.py", "from trl import SFTConfig\n", "a program in Python"),
        ("a.yml", "base_model: [\n", "a.yml, line 2, column 1: not valid YAML"),
        ("a.yml", "base_model: m\nbase_model: n\n", '"base_model" is given twice; keep one'),
        ("a.json", '{"SFTConfig": {"seed": 1}, "args": {"seed": 2}}', "seed is given twice"),
        ("a.yml", "base_model: m\nspecial_tokens: x\n", "a value of another kind than axolotl"),
        ("a.yml", "base_model: m\ndatasets: [{path: [1]}]\n", "of another kind than axolotl"),
        ("a.yml", "- 1\n", "must hold one object"),
        ("a.yml", "name: x\n", "is not of axolotl, LLaMA-Factory or TRL"),
        ("a.json", '{"coordinator": {}, "shard_plan": []}', "is not of axolotl"),
        ("missing.yml", None, "cannot read missing.yml"),
    ],
)
def test_what_cannot_be_converted_is_refused(name, text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["convert", name]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "hetero_config.json").exists()


def test_an_existing_file_stays(tmp_path, capsys):
    (tmp_path / "c.json").write_text("{}")
    assert main(["convert", str(FOREIGN / "trl_full.yaml"), "-o", str(tmp_path / "c.json")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "c.json").read_text() == "{}"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:This class will be removed:FutureWarning")
@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward", "orpo", "cpo"])
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--learning_rate 3e-4 --lr_scheduler_type cosine --warmup_steps 7 --weight_decay 0.1"
        " --adam_beta2 0.95 --max_grad_norm 0.5 --optim adamw_torch --max_length 64 --seed 7",
        "--eval_strategy steps --eval_steps 5 --save_steps 10 --load_best_model_at_end --bf16 false"
        " --metric_for_best_model eval_loss --per_device_train_batch_size 2 --num_train_epochs 2"
        " --gradient_checkpointing false --logging_steps 3 --max_steps 20 --save_total_limit 2",
    ],
)
def test_keys_mean_what_trls_own_parser_says(method, options, convert, tmp_path):
    classes = {"sft": trl.SFTConfig, "reward": trl.RewardConfig}
    cls: Any = classes[method] if method in classes else trl_classes(method)[1]
    parser = transformers.HfArgumentParser(cls)
    line = f"{options} --output_dir out"
    (theirs,) = parser.parse_args_into_dataclasses([*line.split(), "--use_cpu"])
    keys = (option.split() for option in line.split("--")[1:])
    keys = "".join(f"{name}: {value[0] if value else 'true'}\n" for name, *value in keys)
    _, config = convert("t.yaml", f"trl: {method}\n{BEGIN['t.yaml']}{keys}")
    command = f"trl {method} --model_name_or_path m --dataset_name d {line}\n"
    assert convert("a.txt", command)[1].training == config.training
    ours = {**config.data.model_dump(), **config.training.model_dump()}
    differs = {
        *("report_to", "run_name", "logging_dir", "hub_strategy", "log_level", "loss_type"),
        *("precompute_ref_log_probs", "pad_token", "lr_scheduler_kwargs"),
        *("train_sampling_strategy", "metric_for_best_model"),
        *("bf16", "project", "pad_to_multiple_of", "eval_steps"),
        *("assistant_only_loss", "completion_only_loss", "greater_is_better", "eval_strategy"),
    }
    names = {field.name for field in dataclasses.fields(cls)} & ours.keys() - differs
    assert len(names) > 30
    assert {n: ours[n] for n in names} == {n: getattr(theirs, n) for n in names}
    assert config.training.evaluation == theirs.eval_strategy
    if theirs.eval_strategy != "no":
        assert ours["eval_steps"] == theirs.eval_steps
    assert ours["bf16"] == ("--bf16 false" not in options)


def test_a_pair_loss_is_judged_beside_all_settings(convert, monkeypatch):
    """Whatever order they stand in."""

    def check(training: Any) -> None:
        if training.beta > 0.2 or training.per_device_train_batch_size != 3:
            raise ValueError("needs a small beta and batches of 3")

    monkeypatch.setitem(PAIR_LOSSES, "dpo", dict(PAIR_LOSSES["dpo"]))
    register_pair_loss("picky", check=check)(lambda pairs: pairs.delta_P)
    text = "trl: dpo\nloss_type: picky\nper_device_train_batch_size: 3\nbeta: {}\n"
    for beta, loss in (("0.1", "picky"), ("0.3", None)):
        _, config = convert("dpo.yml", text.format(beta))
        assert config.setting("training.loss_type") == loss
