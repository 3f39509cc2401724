"""`hetero plan --dry-run`: from config.json and makers' figures alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hetero_framework.cli import main
from hetero_framework.extras.planner import estimate, load_profile
from tests.samples import plan_of, save_texts, save_tokenizer

FIELDS = {
    **{"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512, "vocab_size": 32000},
    **{"intermediate_size": 1536, "num_attention_heads": 8, "architectures": ["LlamaForCausalLM"]},
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with config.json and nothing else; the working directory is its parent."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS))
    monkeypatch.chdir(tmp_path)
    return folder


def configured(folder: Path, **sections: Any) -> None:
    raw = {
        "coordinator": {"ip": "127.0.0.1"},
        "workers": [{"id": 1, "ip": "worker.invalid"}, {"id": "box", "ip": "box.invalid"}],
        "shard_plan": [{"id": "local", "start": 0, "end": 4}, {"id": 1, "start": 4, "end": 8}],
        "model": {"name_or_path": str(folder)},
        "adapter": {"r": 8, "target_modules": "all-linear"},
        "training": {"gradient_accumulation_steps": 8},
        **sections,
    }
    Path("hetero_config.json").write_text(json.dumps(raw))


Estimated, Printed = Callable[..., dict[str, Any]], Callable[..., str]


@pytest.fixture
def estimated(model, capsys):
    """What `hetero plan --dry-run` estimates with these options."""

    def found(*words: str) -> dict[str, Any]:
        assert main(["plan", "--dry-run", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return found


@pytest.fixture
def printed(model, capsys):
    """What it prints, or with another code its error."""

    def found(*words: str, code: int = 0) -> str:
        assert main(["plan", "--dry-run", *words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return found


def test_a_model_and_names_of_devices_are_enough(estimated):
    words = ["--model", "./model", "--device", "local=RTX 4090", "--device", "2=RTX 3060"]
    words += ["--batch-size", "8", "--max-length", "2048"]
    found = estimated(*words, "--bandwidth", "10Gbit/s", "--save-profile", "fleet.json")
    assert found["estimate"]["factor"] == 2.0
    assert [device["id"] for device in found["estimate"]["devices"]] == ["local", 2]
    assert 0 < found["estimate"]["memory_margin"]["2"] < 12 * 2**30
    profile = load_profile("fleet.json")
    fast, slow = profile.devices
    assert profile.layers == 8
    # Bounded by arithmetic, 165.2 against 25.5 TFLOPS, or by memory, 1008 against 360 GB/s.
    ratio = slow.layer_forward_s[0] / fast.layer_forward_s[0]
    assert 1008 / 360 < ratio < 1.001 * 165.2 * 0.95 / (25.5 * 0.85)
    assert {link.bytes_per_s for link in profile.links} == {0.94 * 10e9 / 8}
    assert sorted(path.name for path in Path().iterdir()) == ["fleet.json", "model"]


def test_the_configuration_lists_the_devices(model, estimated):
    configured(model)
    named = ["--device", "local=RTX 3090", "--device", "1=RTX 3090", "--device", "box=RTX 3090"]
    found = estimated(*named, "--bandwidth", "box=1Mbit/s")
    assert found["unused"] == ["box"] or len(found["shard_plan"]) == 1
    speeds = {d["id"]: d["network_bytes_per_s"] for d in found["estimate"]["devices"]}
    assert speeds == {"local": 125e6, 1: 125e6, "box": 125e3}
    for words in (named[:4], named):
        found = estimated(*words, "--exclude", "box")
        assert [device["id"] for device in found["estimate"]["devices"]] == ["local", 1]


def test_tiny_copies_are_computed_on_one_thread(estimated, monkeypatch):
    seen, work = [], estimate.model_work
    counted = lambda *given: seen.append(torch.get_num_threads()) or work(*given)  # noqa: E731
    monkeypatch.setattr(estimate, "model_work", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        estimated("--model", "./model", "--device", "local=RTX 4090")
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_a_dry_run_is_labelled_as_an_estimate(printed):
    said = printed("--model", "./model", "--device", "local=RTX 4090")
    assert said.startswith("An ESTIMATE from config.json and makers' figures")
    assert "coordinator: RTX 4090 (24.0 GiB, 165 TFLOPS (16-bit), 1008 GB/s)" in said
    assert "assumed: ada: at most 95% of the arithmetic" in said


def test_an_estimated_plan_can_be_written(model, estimated):
    configured(model)
    named = ["--device", "local=RTX 3090", "--device", "1=RTX 3090", "--exclude", "box"]
    found = estimated(*named, "--pin", "1=6:8", "--write")
    written = json.loads(Path("hetero_config.json").read_text())["shard_plan"]
    assert [(e["id"], e["start"], e["end"]) for e in written] == [
        (e["id"], e["start"], e["end"]) for e in found["shard_plan"]
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the device of worker 1 and worker box is not known"),
        (["--device", "1=RTX 3099"], "--device 1=RTX 3099: 'RTX 3099' is not a known device"),
        (["--device", "7=RTX 3090"], "--device 7=RTX 3090 is not of the form ID=NAME"),
        (["--device", "RTX 3090"], "is not of the form ID=NAME"),
        (["--bandwidth", "fast"], "--bandwidth fast is not a network speed"),
        (["--bandwidth", "0Gbit/s"], "is not a network speed"),
        (["--bandwidth", "7=1Gbit/s"], "'7' is not a process; there are: local, 1, box"),
        (["--exclude", "7"], "there is no worker"),
        (["--model", "./none"], "no model directory"),
        (["--measure"], "needs one of --measure, --dry-run and --profile"),
    ],
)
def test_wrong_options_end_with_2_and_leave_nothing(words, said, model, printed):
    configured(model)
    known = ["--device", "1=RTX 3090", "--device", "box=RTX 3090", "--device", "local=RTX 3090"]
    if words and words[0] != "--device":
        words = [*known, *words]
    assert said in printed(*words, "--save-profile", "fleet.json", "--write", code=2)
    assert not Path("fleet.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no config.json"),
        ("{", "config.json"),
        ('{"hidden_size": 64}', "no config.json that names its model_type"),
        ('{"model_type": "perceptron"}', "has no model type 'perceptron'"),
    ],
)
def test_a_model_that_cannot_be_read_ends_with_2(content, said, model, printed):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    assert said in printed("--model", "./model", "--device", "local=RTX 3090", code=2)


@pytest.mark.parametrize("option", ["--model", "--device", "--bandwidth"])
def test_options_of_a_dry_run_need_dry_run(option, capsys):
    assert main(["plan", "--measure", option, "1=x"]) == 2
    assert f"{option} goes with --dry-run" in capsys.readouterr().err


def test_length_of_the_samples_can_be_set_without_naming_data(estimated):
    words = ["--model", "./model", "--device", "local=RTX 4090", "--set"]
    short, long = (estimated(*words, f"data.max_length={length}") for length in (256, 2048))
    assert long["predicted_step_s"] > short["predicted_step_s"]


def test_the_job_is_reported_with_tokens_per_second_and_hours(estimated, printed):
    words = ["--model", "./model", "--device", "local=RTX 4090", "--device", "1=RTX 3060"]
    words += ["--adapter", "qlora", "--max-length", "512", "--batch-size", "4"]
    found = estimated(*words)
    job, pace = found["estimate"]["job"], found["estimate"]["pace"]
    assert job == {
        "adapter": {"r": 16, "modules": "all-linear"},
        "weights": {"local": "nf4", "1": "nf4"},
        **{"rows": 4, "max_length": 512, "micro_batches": 8, "epoch_tokens": None},
    }
    per_s = 4 * 512 * 8 / found["predicted_step_s"]
    assert pace["tokens_per_s"] == pytest.approx(per_s)
    assert pace["hours"] == pytest.approx(1e6 / per_s / 3600)
    said = printed(*words)
    assert "job: LoRA of rank 16 on all-linear, over nf4" in said
    assert "4 samples of 512 tokens in a micro-batch, 8 micro-batches in a step" in said
    assert f"{per_s:,.0f} tokens/s" in said
    assert "a million tokens takes" in said
    whole = estimated(*words[:6], "--adapter", "none")
    assert whole["estimate"]["job"]["adapter"] is None
    assert whole["estimate"]["job"]["weights"]["1"] == "bfloat16"


def test_an_epoch_of_data_that_are_here_is_counted(model, estimated):
    tokenizer = save_tokenizer(model)
    texts = save_texts(model.parent / "texts.jsonl", 8)
    alone = {"workers": [], "shard_plan": plan_of(("local", 8))}
    configured(model, data={"train": str(texts), "max_length": 16}, **alone)
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    lengths = [len(tokenizer(row + tokenizer.eos_token)["input_ids"]) for row in rows]
    tokens = sum(min(16, length) for length in lengths)
    found = estimated("--device", "local=cpu")
    assert found["estimate"]["job"]["epoch_tokens"] == tokens
    assert found["estimate"]["pace"]["tokens"] == tokens


def test_a_mac_beside_cards_holds_no_4_bits_where_bitsandbytes_has_none_for_it(
    model, estimated, printed, monkeypatch
):
    monkeypatch.setattr(estimate, "without_four_bit", {"mps": "no backend"}.get)
    devices = ["--device", "local=RTX 4090", "--device", "1=Apple M2 Max 64GB"]
    words = ["--adapter", "qlora", "--save-profile", "fleet.json"]
    found = estimated("--model", "./model", *devices, *words)
    assert found["estimate"]["job"]["weights"] == {"local": "nf4", "1": "bfloat16"}
    card, mac = load_profile("fleet.json").devices
    matrices = 4 * 512 * 512 + 3 * 512 * 1536
    assert mac.layer_bytes[0] - card.layer_bytes[0] == pytest.approx(
        2 * matrices - matrices * (0.5 + 1 / 64), rel=0.02
    )
    configured(model, model={"name_or_path": str(model), "quantization": "nf4"})
    words = [*devices, "--exclude", "box"]
    said = printed(*words, code=2)
    assert "worker 1 cannot hold quantised weights" in said
    assert 'set "quantization": "none"' in said
    workers = [{"id": 1, "ip": "worker.invalid", "quantization": "none"}, {"id": "box", "ip": "b"}]
    configured(model, model={"name_or_path": str(model), "quantization": "nf4"}, workers=workers)
    printed(*words, "--write")
    written = json.loads(Path("hetero_config.json").read_text())
    assert written["workers"][0]["quantization"] == "none"


def test_a_plan_for_another_job_is_not_written(model, printed):
    configured(model)
    assert "a plan for another job" in printed("--batch-size", "2", "--write", code=2)


def test_memory_of_the_machines_counts_and_is_said(estimated):
    words = ["--model", "./model", "--device", "local=RTX 4090 +64GB", "--device", "2=RTX 3060"]
    found = estimated(*words, "--adapter", "lora", "--save-profile", "fleet.json")
    (said,) = [line for line in found["estimate"]["assumed"] if "beside their cards" in line]
    assert "coordinator 64.0 GiB, worker 2 32.0 GiB (assumed)" in said
    assert "copies at 25 GB/s, computing 5% slower meanwhile" in said
    local, other = load_profile("fleet.json").devices
    assert (local.host_bytes, other.host_bytes) == (0.8 * 64 * 2**30, 24 * 2**30)
    assert local.host_to_device_bytes_per_s == 25e9
    # Adapter, its gradients and its optimizer states stay on the card.
    weights = 2 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512)
    assert local.layer_frozen_bytes[0] == pytest.approx(weights, abs=1000)  # and buffers
    assert local.layer_bytes[0] > local.layer_frozen_bytes[0] + 10000
    macs = ["--model", "./model", "--device", "local=Apple M2 Max 64GB", "--overwrite"]
    found = estimated(*macs, "--save-profile", "fleet.json")
    assert not any("beside their cards" in line for line in found["estimate"]["assumed"])
    (one,) = load_profile("fleet.json").devices
    assert (one.host_bytes, one.host_to_device_bytes_per_s) == (0, 0)


def test_a_model_larger_than_the_card_is_streamed(model, printed):
    wide = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    (model / "config.json").write_text(json.dumps({**FIELDS, **wide, **heads}))
    words = ["--model", "./model", "--device", "local=RTX 4090 +64GB"]
    said = printed(*words, "--device", "1=RTX 3090 +64GB", "--adapter", "qlora")
    assert "Layers in host memory:\n  coordinator: " in said
    assert "longer than with all of them on the device" in said
    assert "and computing bounds it" in said
    assert "A step of fewer machines:\n  coordinator alone: " in said
    assert "without worker 1" not in said  # the same
    assert " tokens/s (" in said.partition("coordinator alone: ")[2]


def test_many_machines_are_not_searched_without_each(printed):
    words = ["--model", "./model", "--device", "local=RTX 4090"]
    for k in range(1, 9):
        words += ["--device", f"{k}=RTX 3060"]
    assert "A step of fewer machines:\n  not searched for more than 8 machines" in printed(*words)


PAGE = Path(__file__).parents[3] / "docs" / "three_machines.md"


@pytest.mark.long
def test_the_page_has_the_figures_of_its_commands(estimated):
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^hetero (plan --dry-run --model .*)$", text, re.MULTILINE)
    sizes = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064}
    fields = {**FIELDS, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    folder = Path("Qwen", "Qwen2.5-32B")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**fields, **sizes, **heads}))
    pile, alone = map(shlex.split, commands)
    together, single = estimated(*pile[2:]), estimated(*alone[2:])
    rate = f"{together['estimate']['pace']['tokens_per_s']:.0f}"
    first, second, here = (
        f"{together['tokens'] / one['step_s']:.0f}" for one in together["compared"]
    )
    words = " ".join(text.split())
    assert f"reach {rate} tokens per second. Without the RTX 3090 they reach {first}, wi" in words
    assert f"without the Radeon {second}, and the RTX 4090 alone reaches {here}." in words
    assert f"(here {rate}, which may be off by a factor of two)" in words
    (use,) = single["devices"]
    times = single["predicted_step_s"] / together["predicted_step_s"]
    assert f"Here {use['streamed']} of the 64 layers visit the card" in words
    assert f"a step takes {times:.2f} times as long" in words
    recipe = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert recipe["shard_plan"] == [
        {name: entry[name] for name in entry if name != "links"} for entry in together["shard_plan"]
    ]


def test_states_are_in_host_memory_only_where_it_is_another(estimated):
    devices = ["--device", "local=RTX 3090", "--device", "1=Apple M2 Max 64GB"]
    words = ["--model", "./model", *devices, "--adapter", "none", "--save-profile", "fleet.json"]
    estimated(*words, "--overwrite")
    card, mac = load_profile("fleet.json").devices
    estimated(*words, "--overwrite", "--set", "training.offload_optimizer=true")
    with_host, same = load_profile("fleet.json").devices
    assert (same.layer_bytes, same.layer_host_bytes) == (mac.layer_bytes, (0,) * 8)
    there = zip(with_host.layer_bytes, with_host.layer_host_bytes, strict=True)
    assert tuple(a + b for a, b in there) == card.layer_bytes
    assert min(with_host.layer_host_bytes) > 0
    assert with_host.embedding_host_bytes > 0 < with_host.head_host_bytes


def test_stored_inputs_count_only_where_host_memory_is_another(estimated):
    devices = ["--device", "local=RTX 3090", "--device", "1=Apple M2 Max 64GB"]
    words = ["--model", "./model", *devices, "--adapter", "lora", "--save-profile", "fleet.json"]
    estimated(*words, "--set", "training.activation_offloading=true")
    card, mac = load_profile("fleet.json").devices
    assert (card.layer_input_bytes, mac.layer_input_bytes) == ((2 * 1024 * 512,) * 8, (0,) * 8)
    assert card.host_to_device_bytes_per_s > 0 == mac.host_to_device_bytes_per_s


def test_trained_layers_visit(estimated):
    words = ["--model", "./model", "--device", "local=RTX 4090", "--adapter", "none"]
    words += ["--save-profile", "fleet.json"]
    estimated(*words)
    profile = load_profile("fleet.json")
    (card,) = profile.devices
    assert card.layer_frozen_bytes == card.layer_bytes
    # Weights, gradients and two states, all in 16 bits: layer_bytes is four of them. Weights come,
    # gradients come and leave for each micro-batch; then all four come for the step, gradients once
    # more for their norm, and three leave. The first micro-batch fetches no gradient.
    moved = [(4 * profile.micro_batches + 7) * nbytes / 4 for nbytes in card.layer_bytes]
    assert card.layer_step_bytes == pytest.approx(moved, rel=1e-4)  # a layer's buffers come, too


def test_sampling_and_a_step_of_grpo_are_estimated(model, estimated, printed):
    job = ["--adapter", "lora", "--max-length", "512", "--batch-size", "8", "--workload", "grpo"]
    words = ["--model", "./model", "--device", "local=RTX 4090", *job]
    found = estimated(*words)
    sampling = found["estimate"]["rollouts"]
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(LlamaConfig(**FIELDS))
        ids = torch.zeros((8, 512), dtype=torch.int64)
        cache = whole(input_ids=ids, use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    groups = found["estimate"]["job"]["micro_batches"]
    assert sampling["caches"] == {"local": min(groups, 2) * kept}
    read = sum(p.nbytes for name, p in whole.named_parameters() if "embed" not in name)
    assert 0 < sampling["tokens_per_s"] <= 8 * 1008e9 / read  # each token reads all weights
    texts = groups * 8 * 512 / sampling["tokens_per_s"]
    assert sampling["step_s"] == pytest.approx(texts + found["predicted_step_s"])
    more = estimated(*[word if word != "8" else "16" for word in words])
    assert more["estimate"]["rollouts"]["tokens_per_s"] > 1.5 * sampling["tokens_per_s"]
    assert "sampling: " in printed(*words)
    assert "its caches, beside what the plan counts: coordinator " in printed(*words)
    assert "rollouts" not in estimated(*words[:-2])["estimate"]
