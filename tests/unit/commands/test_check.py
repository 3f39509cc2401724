from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_framework import cli
from hetero_framework.commands.check_report import check, forecast, text
from hetero_framework.config import Config, load_config
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import ConfigError, DataError, DeviceError, PlanError
from hetero_framework.trainer.setup import prepare
from hetero_framework.units import size
from tests.installed import needs
from tests.samples import plan_of
from tests.unit.data_helpers import CHATML, tiny_tokenizer, write_jsonl

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 400,
}


Checked = Callable[..., dict[str, Any]]


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "ab"}\n', encoding="utf-8")
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    return {
        "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"},
        "workers": [{"id": 1, "ip": "127.0.0.1", "port": 29512, "device": "cpu"}],
        "shard_plan": plan_of(("local", 0), (1, 3), ("local", 4)),
        "model": {"from_config": LLAMA, "tokenizer": "tokenizer"},
        "data": {"train": "train.jsonl"},
        "training": {"gradient_accumulation_steps": 8},
    }


@pytest.fixture
def checked(raw, tmp_path, verdicts):
    """Checks the configuration, after replacing the sections that are given."""
    return lambda **sections: check(Config.from_dict({**raw, **sections}, tmp_path))


def test_check_reports_layers_and_memory_of_each_process(checked):
    found = checked()
    coordinator, worker = found["processes"]
    assert [stage["index"] for stage in coordinator["stages"]] == [0, 2]
    assert [stage["index"] for stage in worker["stages"]] == [1]
    # Three layers of four hidden x hidden and three hidden x intermediate matrices, two norms.
    weights = 3 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) * 4
    assert worker["stages"][0]["memory"]["weights"] >= weights
    assert worker["stages"][0]["memory"]["weights"] < 1.1 * weights
    assert worker["stages"][0]["memory"]["optimizer"] == 2 * weights
    assert coordinator["memory_bytes"] > 0
    assert found["this_machine"]["role"] == "coordinator and worker 1"
    assert not any(note.startswith("warning") for note in found["notes"])
    assert any(note.startswith("train: 1 examples, ") for note in found["notes"])
    assert found["examples"] == []
    json.dumps(found)


def test_report_is_a_table_with_layers(checked):
    shown = text(checked())
    assert "The configuration is valid: llama with 4 layers on 2 processes." in shown
    rows = [line.split("  ") for line in shown.splitlines() if "port" in line]
    assert "embedding, layer 3 + head" in [cell.strip() for cell in rows[0]]
    assert "layers 0-2" in [cell.strip() for cell in rows[1]]
    assert "This machine: coordinator and worker 1." in shown


@needs("classification")
def test_report_names_an_objective_that_is_not_the_usual_one(raw, tmp_path, checked):
    assert checked()["objective"] == "sft"
    rows = '{"text": "ab", "label": "good"}\n{"text": "b", "label": "bad"}\n'
    (tmp_path / "train.jsonl").write_text(rows, encoding="utf-8")
    raw["training"]["objective"] = "classification"
    shown = text(checked())
    assert "llama with 4 layers on 2 processes, to learn with classification." in shown
    assert "labels: 2 (bad, good), single_label_classification" in shown


@needs("preferences")
@pytest.mark.parametrize("plan", ["given", "auto"])
def test_an_objective_that_does_not_fit_is_refused_on_any_machine(plan, raw, tmp_path, checked):
    pair = '{"prompt": "a", "chosen": "b", "rejected": "ab"}\n'
    (tmp_path / "train.jsonl").write_text(pair, encoding="utf-8")
    raw["coordinator"] = {"hostname": "elsewhere", "ip": "10.255.0.1"}
    raw["training"] |= {"objective": "dpo", "precompute_ref_log_probs": False}
    if plan == "auto":
        raw["shard_plan"] = "auto"
    with pytest.raises(ConfigError, match="without a new adapter no step can ask"):
        checked()
    checked(adapter={})


@pytest.mark.parametrize("plan", [{}, {"shard_plan": "auto"}], ids=["given", "auto"])
@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ('{"text": "ab"}\n{"text": 3}\n', {}, r"train\.jsonl:2: the field text must be a string"),
        ('{"text": "ab"}\n', {"eval": "absent.jsonl"}, r"data file not found: absent\.jsonl"),
        ('{"text": "ab"}\n', {"eos_token": "<nope>"}, "the tokenizer has no token '<nope>'"),
        ('{"text": ""}\n', {}, "none of the 1 examples has a token to learn from"),
    ],
)
def test_check_refuses_data_that_train_would_refuse(
    checked, tmp_path, rows, changes, message, plan
):
    (tmp_path / "train.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        checked(data={"train": "train.jsonl", **changes}, **plan)


@pytest.mark.parametrize(
    ("section", "changed", "error", "message"),
    [
        (
            "shard_plan",
            plan_of(("local", 0), (1, 3), ("local", 5)),
            PlanError,
            "covers 5 layers, but the model has 4",
        ),
        ("data", {"train": "absent.jsonl"}, DataError, r"absent\.jsonl"),
        (
            "model",
            {"from_config": {**LLAMA, "vocab_size": 20}, "tokenizer": "tokenizer"},
            DataError,
            r"train\.jsonl:1: token .* the model has only 20 embeddings",
        ),
        (
            "training",
            {"dataloader_drop_last": True, "per_device_train_batch_size": 2},
            DataError,
            "1 examples do not fill one micro-batch of 2",
        ),
    ],
    ids=["more layers", "no data", "fewer embeddings", "fewer examples"],
)
def test_check_refuses_parts_that_do_not_fit_or_are_absent(
    section, changed, error, message, checked
):
    with pytest.raises(error, match=message):
        checked(**{section: changed})


def test_large_data_are_checked_by_their_first_examples(raw, tmp_path, monkeypatch, checked):
    monkeypatch.setattr("hetero_framework.commands.check_report.MOST_EXAMPLES", 3)
    (tmp_path / "train.jsonl").write_text('{"text": "ab"}\n' * 3, encoding="utf-8")
    assert not any("looked at" in note for note in checked()["notes"])
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"text": "ab"}\n{"text": 3}\n')
    assert "train: only the first 3 examples were looked at" in checked()["notes"]
    with pytest.raises(DataError, match=r"train\.jsonl:5: the field text must be a string"):
        prepare(Config.from_dict(raw, tmp_path))


CHAT = [
    {"role": "user", "content": "What is [it]?\tü🦊"},
    {"role": "assistant", "content": "Four.\nNot \x1b[31mthree"},
]


@pytest.fixture
def chat(raw, tmp_path):
    rows = [{"messages": CHAT}, {"messages": CHAT[:1] + [{**CHAT[1], "content": "four " * 99}]}]
    write_jsonl(tmp_path / "train.jsonl", rows)
    raw["data"]["max_length"] = 64
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    return file


@needs("observe")
def test_show_has_the_tokens_and_the_labels_of_a_run(chat, capsys):
    assert cli.main(["check", "--config", str(chat), "--show", "5", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["examples"]
    tokenizer = tiny_tokenizer(CHATML)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert first["where"].endswith("train.jsonl:1")
    assert "".join(piece for piece, _ in first["pieces"]) == text
    assert first["tokens"] == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    trained = "".join(piece for piece, covered in first["pieces"] if covered)
    assert trained == "Four.\nNot \x1b[31mthree<|im_end|>\n"
    assert first["left_out"] == []
    config = load_config(chat)
    labels = load_data(config, load_tokenizer(config)).examples[1][1]
    assert second["trained"] == (labels != -100).sum()
    assert second["tokens"] == 64
    whole = len(
        tokenizer.apply_chat_template(
            [CHAT[0], {**CHAT[1], "content": "four " * 99}], return_dict=False
        )
    )
    assert second["left_out"] == [f"{whole - 64} of {whole} tokens (data.max_length)"]


@needs("observe")
def test_show_marks_the_text_in_the_loss(chat, capsys):
    assert cli.main(["check", "--config", str(chat), "--show", "1"]) == 0
    shown = capsys.readouterr().out.partition("The loss covers what is between ⟦ and ⟧;")[2]
    assert "\x1b" not in shown
    assert [line.replace("│", "") for line in shown.splitlines()[3:]] == [
        "  <|im_start|>user\\n",
        "  What is [it]?\\tü🦊<|im_end|>\\n",
        "  <|im_start|>assistant\\n",
        "  ⟦Four.\\n",
        "  Not \\x1b[31mthree<|im_end|>\\n⟧",
    ]


def test_device_that_is_too_small_or_absent_is_a_warning(raw, checked):
    raw["workers"][0]["device"] = "xpu:7"
    raw["training"]["per_device_train_batch_size"] = 10**7
    notes = [line for line in text(checked()).splitlines() if ": " in line]
    assert any(
        line.startswith("Warning: worker 1: this machine has no device 'xpu:7'") for line in notes
    )
    assert any(line.startswith("Warning: the coordinator has ") for line in notes)
    assert any(line.startswith("Note: to fit the memory: give it fewer layers") for line in notes)


def test_seed_format_is_checked_without_a_model(raw, checked):
    raw.pop("model")
    raw.pop("data")
    raw["coordinator"]["ip"] = "192.0.2.77"
    raw["workers"][0]["ip"] = "192.0.2.78"
    shown = text(checked())
    assert "a model with 4 layers" in shown
    assert "This machine: has no role in this configuration." in shown
    assert "there is no model section" in shown


def test_command_prints_text_or_json(raw, tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert cli.main(["check", "--config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 4
    assert cli.main(["check", "--config", str(file)]) == 0
    assert "memory needed" in capsys.readouterr().out


def plan(owners: list[Any], layers_each: int = 2, **training: Any) -> Config:
    workers = sorted({owner for owner in owners if owner != "local"})
    return Config.from_dict(
        {
            "coordinator": {"ip": "127.0.0.1"},
            "workers": [{"id": n, "ip": "127.0.0.1", "port": 7000 + n} for n in workers],
            "shard_plan": plan_of(*((owner, k * layers_each) for k, owner in enumerate(owners, 1))),
            "training": {"gradient_accumulation_steps": 16, **training},
        }
    )


def test_quantised_weights_on_a_device_without_4_bits_are_refused_by_name(raw, tmp_path, checked):
    fields = {**LLAMA, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    raw |= {"adapter": {"r": 4}}
    raw["model"] = {"name_or_path": "model", "quantization": "nf4", "tokenizer": "tokenizer"}
    raw["workers"][0]["device"] = "musa"
    for plan in (raw["shard_plan"], "auto"):
        with pytest.raises(ConfigError) as caught:
            checked(shard_plan=plan)
        assert caught.value.message.startswith("worker 1 cannot hold quantised weights: the inst")
        assert 'set "quantization": "none"' in str(caught.value.hint)
    raw["workers"][0]["quantization"] = "none"
    found = checked()
    assert [process["weights"] for process in found["processes"]] == ["nf4", "none"]
    small, large = (process["stages"] for process in found["processes"])
    # nf4 of embedding, one layer and head against three layers in bfloat16.
    assert large[0]["memory"]["weights"] > 3 * (4 * 32 * 32 + 3 * 32 * 64) * 2
    assert small[1]["memory"]["weights"] < (4 * 32 * 32 + 3 * 32 * 64) * 2 + 400 * 32 * 2
    assert "frozen weights differs by machine (nf4: embedding, layer 3 + head;" in text(found)
    fields["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    raw["model"]["quantization"] = None
    with pytest.raises(ConfigError, match="worker 1 is to hold 'none', but the checkpoint is"):
        checked()


def test_check_reports_the_memory_that_checkpointing_saves(raw, checked):
    raw["training"] |= {"gradient_checkpointing": True, "per_device_train_batch_size": 4}
    always = checked()["processes"]
    raw["training"]["gradient_checkpointing"] = False
    never = checked()["processes"]
    raw["training"]["gradient_checkpointing"] = "auto"
    found = checked()
    for auto, on, off in zip(found["processes"], always, never, strict=True):
        assert auto["memory_bytes"] == off["memory_bytes"]
        assert auto["memory_recomputing_bytes"] == on["memory_bytes"]
        assert off["memory_recomputing_bytes"] is None
    assert "with checkpointing" in text(found)
    assert "with gradient checkpointing, " in text(found)


@needs("host_memory")
def test_check_reports_host_memory_and_where_there_is_none(raw, checked):
    raw |= {"adapter": {"r": 2}}
    raw["coordinator"]["device"] = "cpu"
    worker = raw["workers"][0]
    worker |= {"ip": "10.0.0.9", "device": "cuda:0"}
    raw["training"] |= {"offload_optimizer": True}
    raw["shard_plan"] = plan_of(("local", 0), (1, 4))
    before = checked()["processes"][1]
    raw["shard_plan"][1]["offload"] = "auto"
    auto = checked()
    raw["shard_plan"][1]["offload"] = 4
    found = checked()
    here, there = found["processes"]
    layers = there["host_bytes"] - before["host_bytes"]
    assert (here["host_bytes"], layers > 0) == (0, True)
    assert there["memory_bytes"] == before["memory_bytes"] - layers // 2
    assert auto["processes"][1]["memory_recomputing_bytes"] == there["memory_bytes"]
    assert auto["processes"][1]["memory_bytes"] == before["memory_bytes"]
    said = text(found)
    assert f", {size(there['host_bytes'])} of host memory" in said
    assert "training.offload_optimizer does nothing for coordinator" in said
    worker["device"] = "mps"
    with pytest.raises(DeviceError, match=r"shard_plan\[1\]\.offload: .* as for worker 1"):
        checked()


def test_plan_that_is_left_to_the_run_is_explained(raw, checked):
    raw["shard_plan"] = "auto"
    found = checked()
    assert found["layers"] == 4
    assert [process["name"] for process in found["processes"]] == ["coordinator", "worker 1"]
    said = text(found)
    assert "not planned yet" in said
    assert "needs" not in said
    assert 'shard_plan is "auto": `hetero train` measures the machines' in said


PLAN = [["plan", "--measure"], ["plan", "--dry-run"]]


@pytest.mark.parametrize(
    "words", [["train"], *(pytest.param(words, marks=needs("planner")) for words in PLAN)]
)
def test_an_automatic_plan_without_a_model_is_refused(words, raw, tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**raw, "shard_plan": "auto", "model": None}))
    assert cli.main([*words, "--config", str(file), "--insecure-plaintext"]) == 2
    assert 'the configuration has no "model" section' in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "c.json",
        "tokenizer",
        "train.jsonl",
    ]


def test_command_takes_the_plan_that_a_run_has_kept(raw, tmp_path, capsys):
    kept = tmp_path / "runs" / "default" / "plan.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"shard_plan": raw["shard_plan"], "seconds": 0.1}))
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**raw, "shard_plan": "auto"}))
    assert cli.main(["check", "--config", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(process["stages"]) for process in found["processes"]] == [2, 1]
    kept.write_text(json.dumps({"shard_plan": [{"id": "local", "start": 1, "end": 4}]}))
    assert cli.main(["check", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert "plan.json" in said
    assert "shard_plan[0].start: is 1" in said
    assert "--fresh" in said


def test_forecast_is_near_the_known_bubble():
    found = forecast(plan(["local", 1, 2, 3]))
    # (p - 1) / (m + p - 1) with free boundaries; they are assumed to cost a little.
    assert 3 / 19 <= found["bubble"] < 3 / 19 + 0.04
    assert (found["micro_batches"], found["chunks"]) == (16, 1)
    assert len(found["held"]) == 4
    interleaved = forecast(plan(["local", 1, 2, 3] * 2, layers_each=1))
    assert interleaved["chunks"] == 2
    assert interleaved["bubble"] < 0.8 * found["bubble"]
    fewer = forecast(plan(["local", 1, 2, 3], gradient_accumulation_steps=4))
    assert fewer["bubble"] > 2 * found["bubble"]


def test_forecast_takes_the_configured_window():
    free = forecast(plan(["local", 1, 2, 3]))
    found = forecast(plan(["local", 1, 2, 3], max_in_flight=2))
    assert found["max_in_flight"] == 2
    assert max(found["held"]) <= 2
    assert found["bubble"] > free["bubble"] + 0.2


def test_report_says_how_busy_the_devices_will_be(raw, checked):
    raw.pop("model")
    shown = text(checked())
    assert "A step of 8 micro-batches, 2 stages per process: devices idle " in shown
    assert "under way; stages store up to" in shown
    raw["training"]["gradient_accumulation_steps"] = 1
    assert "a larger training.gradient_accumulation_steps" in text(checked())


def test_one_process_has_no_forecast(raw, checked):
    raw["workers"], raw["shard_plan"] = [], [{"id": "local", "start": 0, "end": 4}]
    found = checked()
    assert found["schedule"]["bubble"] == 0.0
    shown = text(found)
    assert "idle" not in shown
    assert "under way" not in shown
