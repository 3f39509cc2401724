"""Adapters on shards against stock transformers and PEFT on the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hetero_framework.config import AdapterConfig
from hetero_framework.errors import CheckpointError, ConfigError
from hetero_framework.models.adapters.lora import (
    adapter_tensors,
    explicit_settings,
    plan_adapter,
    plan_saved_adapter,
)
from hetero_framework.models.adapters.trainable import export_parts, trainable_parameters
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.files.export import OutputDirectory, write_adapter
from tests.cases import spread
from tests.unit.adapter_helpers import (
    PREFIX,
    chain_logits,
    check_gradients,
    randomise,
    save_model,
    shards,
    stock,
    stock_logits,
    write,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def config(llama):
    return AutoConfig.from_pretrained(llama)


def stock_peft(base: Path, adapter: Path, **kwargs: Any) -> PeftModel:
    model = PeftModel.from_pretrained(stock(base), str(adapter), **kwargs)
    model.train(False)
    return model


CASES = {
    "default targets": ("llama", {"lora_dropout": 0.1}),
    "all-linear DoRA": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "regex, rslora, biases": ("gpt2", {
        "target_modules": r".*\.h\.[13]\.attn\.c_attn", "use_rslora": True, "bias": "all"}),
    "biases of the update": ("gpt2", {"lora_bias": True, "target_modules": ("c_attn", "c_fc")}),
    "biases where the base has none": ("llama", {"lora_bias": True, "bias": "lora_only"}),
    "one layer only": ("llama", {"layers_to_transform": (2,), "target_modules": ("q_proj",)}),
    "patterns": ("llama", {
        "target_modules": ("q_proj", "v_proj"), "exclude_modules": r".*layers\.0\..*",
        "rank_pattern": {r"layers\.3\.self_attn\.q_proj": 3}, "alpha_pattern": {"v_proj": 5}}),
    "tied embedding, saved norm": ("gemma", {
        "target_modules": ("q_proj", "embed_tokens"), "modules_to_save": ("norm",)}),
    "saved head": ("llama", {"modules_to_save": ("lm_head",), "target_modules": ("o_proj",)}),
    "experts' own parameters": ("mixtral", {
        "target_modules": ("q_proj",),
        "target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        "rank_pattern": {"mlp.experts.down_proj": 2}, "alpha_pattern": {"q_proj": 3}}),
    "parameters alone, of some layers": ("qwen3_moe", {
        "target_modules": (), "target_parameters": ("mlp.experts.down_proj", "mlp.gate.weight"),
        "layers_to_transform": (1, 3)}),
    "layers of a list": ("gpt2", {
        "target_modules": ("c_attn", "c_proj"), "layers_to_transform": (0, 3),
        "layers_pattern": "h", "use_dora": True, "fan_in_fan_out": True}),
    "saved blocks' modules and ends": ("llama", {
        "target_modules": ("q_proj",),
        "modules_to_save": ("mlp", "embed_tokens", "lm_head", "input_layernorm")}),
    "tied ends saved": ("gemma", {"target_modules": ("v_proj",), "modules_to_save": ("lm_head",)}),
    "embedding with DoRA": ("llama", {
        "target_modules": ("embed_tokens", "lm_head", "k_proj"), "use_dora": True}),
    "patterns with DoRA and rslora": ("llama", {
        "target_modules": "all-linear", "use_dora": True, "use_rslora": True,
        "rank_pattern": {"^model.layers.1.mlp.up_proj": 2, r".*\.o_proj": 5},
        "alpha_pattern": {r"layers\.[02]\.mlp\.\w+": 7}}),
    "fused experts": ("mixtral", {"target_modules": ("q_proj", "w1", "w2", "w3")}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("case", CASES)
def test_adapter_trained_on_shards_is_bit_equal_in_stock_models(case, tmp_path):
    model_type, settings = CASES[case]
    base = save_model(tmp_path / "base", model_type)
    parts = shards(base, 0, 1, 3, 4, adapter=AdapterConfig(**settings))
    randomise(parts)
    folder = write(tmp_path / "adapter", parts, base)

    model = stock_peft(base, folder, is_trainable=True)
    assert torch.equal(chain_logits(parts), stock_logits(model))

    check_gradients(parts, model)
    found = [name for part in parts for name, _ in trainable_parameters(part)]
    assert found == sorted(found, key=parts[0].parameter_index)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_initial_weights_depend_on_the_seed_not_on_the_cut(init, llama):
    adapter = AdapterConfig(target_modules="all-linear", init_lora_weights=init)  # type: ignore[arg-type]

    def initial(*bounds: int, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(len(bounds))
        before = torch.get_rng_state()
        parts = shards(llama, *bounds, adapter=adapter, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return {k: t for part in parts for k, t in adapter_tensors(part).items()}

    whole, cut, other = initial(0, 4, seed=1), initial(0, 0, 2, 3, 4, seed=1), initial(0, 4, seed=2)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    a_keys = [key for key in whole if "lora_A" in key]
    assert not any(torch.equal(whole[key], other[key]) for key in a_keys)
    assert len({float(whole[key].sum()) for key in a_keys}) == len(a_keys)


def test_initial_weights_follow_pefts_rule(llama):
    found = adapter_tensors(shards(llama, 0, 4, adapter=AdapterConfig())[0])
    for key, tensor in found.items():
        if "lora_B" in key:
            assert not tensor.any()
        else:
            # Kaiming uniform with a = sqrt(5): uniform in +-1/sqrt(inputs).
            assert 0.9 / 8 < tensor.abs().max() <= 1 / 8


@pytest.mark.parametrize("autocast", [None, True, False])
def test_adapter_over_bfloat16_has_the_type_that_peft_gives_it(autocast, llama, tmp_path):
    settings = AdapterConfig(target_modules=("q_proj", "up_proj"), autocast_adapter_dtype=autocast)
    parts = shards(llama, 0, 2, 4, adapter=settings, dtype="bfloat16")
    dtype = torch.bfloat16 if autocast is False else torch.float32
    assert {p.dtype for part in parts for _, p in trainable_parameters(part)} == {dtype}
    assert parts[0].adapter.plan.number_bytes(2, quantized=False) == dtype.itemsize
    randomise(parts)
    folder = write(tmp_path / "adapter", parts, llama)
    base = stock(llama, dtype=torch.bfloat16)
    given = {} if autocast is None else {"autocast_adapter_dtype": autocast}
    model = PeftModel.from_pretrained(base, str(folder), is_trainable=True, **given)
    model.train(False)
    assert torch.equal(chain_logits(parts), stock_logits(model))
    check_gradients(parts, model)


@pytest.mark.parametrize(("autocast", "expected"), [(None, 2), (True, 4), (False, 2)])
def test_number_bytes_of_an_adapter_over_a_quantised_base(autocast, expected):
    adapter = AdapterConfig(target_modules=("q_proj",), autocast_adapter_dtype=autocast)
    plan = plan_adapter(tiny_config("llama"), adapter)
    assert plan.number_bytes(4, quantized=True) == expected


def test_adapter_config_equals_pefts(llama, config, tmp_path):
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ("q_proj", "v_proj")}
    adapter = AdapterConfig(**settings)
    write(tmp_path / "ours", shards(llama, 0, 2, 4, adapter=adapter), llama)
    lora = LoraConfig(task_type="CAUSAL_LM", **{**settings, "target_modules": ["q_proj", "v_proj"]})
    get_peft_model(stock(llama), lora).save_pretrained(tmp_path / "theirs")
    files = [tmp_path / who / "adapter_config.json" for who in ("ours", "theirs")]
    ours, theirs = (json.loads(file.read_text()) for file in files)
    assert sorted(ours.pop("target_modules")) == sorted(theirs.pop("target_modules"))
    assert ours == theirs
    keys = [set(load_file(file.with_name("adapter_model.safetensors"))) for file in files]
    assert keys[0] == keys[1] == set(plan_adapter(config, adapter).tensors)


def test_targets_are_resolved_on_the_whole_model(config):
    names = plan_adapter(config, AdapterConfig(target_modules=r".*\.[13]\.mlp\.up_proj")).modules
    assert names == ("model.layers.1.mlp.up_proj", "model.layers.3.mlp.up_proj")


def test_shard_without_target_trains_nothing(llama):
    parts = shards(llama, 0, 2, 4, adapter=AdapterConfig(target_modules=r".*layers\.3.*q_proj"))
    assert [len(trainable_parameters(part)) for part in parts] == [0, 2]
    assert adapter_tensors(parts[0]) == {}


PATTERNS = {
    "plain": ("q_proj", "v_proj"),
    "a typo": ("q_porj", "v_proj"),
    "shadowed by a name": ("q_proj", r"layers\.0\.self_attn\.q_proj"),
    "shadowed by an expression": (r".*_proj", "v_proj"),
    "the particular one first": (r"layers\.0\.self_attn\.q_proj", "q_proj"),
    "not targeted": ("q_proj", "down_proj"),
    "a part of a path": (r"layers\.[02]\.self_attn", "q_proj"),
    "part of a name": ("proj", "q_proj"),
    "no such layer": (r"layers\.9\..*", "q_proj"),
    "two that overlap": (r"layers\.[01]\..*", r"layers\.[12]\..*"),
}


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
@pytest.mark.parametrize("keys", PATTERNS.values(), ids=PATTERNS)
def test_patterns_without_effect_are_those_that_peft_applies_nowhere(keys, llama, config):
    """The oracle: each key has a rank of its own, and stock PEFT says which ranks there are."""
    ranks = {key: 3 + number for number, key in enumerate(keys)}
    settings: dict[str, Any] = {"target_modules": ("q_proj", "v_proj"), "rank_pattern": ranks}
    model = get_peft_model(
        stock(llama), LoraConfig(**settings | {"target_modules": ["q_proj", "v_proj"]})
    )
    given = {m.r["default"] for m in model.modules() if hasattr(m, "lora_A")}
    idle = {key for key, rank in ranks.items() if rank not in given}
    for pattern in ("rank_pattern", "alpha_pattern"):
        adapter = AdapterConfig(**{**settings, "rank_pattern": {}, pattern: ranks})
        found = set()
        try:
            plan_adapter(config, adapter)
        except ConfigError as error:
            lines = [line for line in error.message.splitlines() if f"adapter.{pattern}:" in line]
            found = {key for key in keys for line in lines if f"{pattern}: {key!r}" in line}
        assert found == idle


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ("nothing",)}, ["'nothing'"]),
        ({"target_modules": ("q_proj", "qproj")}, ["'qproj'"]),
        ({"modules_to_save": ("head",)}, ["'head'"]),
        ({"target_modules": ("q_proj",), "layers_to_transform": (9,)}, ["9"]),
        ({"target_modules": ("q_proj", "v_porj", "dwon_proj")}, ["v_proj", "down_proj"]),
        ({"target_modules": ("q_proj",), "rank_pattern": {"q_porj": 3}}, ["q_proj"]),
        ({"target_parameters": ("mlp.up_porj.weigth",)}, ["weight"]),
        ({"target_modules": ("q_proj",), "modules_to_save": ("lm_haed",)}, ["lm_head"]),
        ({"layers_to_transform": (0, 7)}, ["layer 7", "0 to 3"]),
        ({"layers_to_transform": 0, "layers_pattern": ("layers", "layres")}, ["layres"]),
    ],
)
def test_an_entry_that_matches_nothing_comes_with_near_names_and_all_modules(
    settings, said, config
):
    adapter = AdapterConfig(**{"target_modules": ("q_proj", "v_proj"), **settings})
    with pytest.raises(ConfigError, match=r"down_proj, .*q_proj") as caught:
        plan_adapter(config, adapter)
    assert [word for word in said if word not in caught.value.message] == []


@pytest.mark.parametrize("asked", [("k_porj", "v_proj"), r".*\.k_porj"])
def test_an_exclusion_of_nothing_is_a_remark(asked, config):
    """Nothing else is lost with it, and one list may serve several architectures."""
    adapter = AdapterConfig(target_modules=("q_proj", "k_proj"), exclude_modules=asked)
    (remark,) = plan_adapter(config, adapter).remarks
    assert remark.startswith("adapter.exclude_modules: no module of the model matches")
    assert "'k_proj'" in remark


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
def test_a_saved_adapter_with_idle_patterns_is_continued_with_a_remark(llama, config, tmp_path):
    lora = LoraConfig(target_modules=["q_proj"], rank_pattern={"k_proj": 4})
    get_peft_model(stock(llama), lora).save_pretrained(tmp_path)
    adapter = AdapterConfig(init_from=str(tmp_path))
    (remark,) = plan_adapter(config, adapter).remarks
    assert "'k_proj' matches no module" in remark
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace("k_proj", "(k_proj"))
    with pytest.raises(ConfigError, match=r"adapter_config.json: rank_pattern: .* position 0"):
        plan_adapter(config, adapter)


@pytest.mark.parametrize(
    ("model_type", "settings", "advised"),
    [
        ("olmoe", {"lora_dropout": 0.1}, {"lora_dropout": 0}),
        ("olmoe", {"use_dora": True}, {"use_dora": False}),
        ("falcon_h1", {}, {"exclude_modules": ("out_proj", "conv1d")}),
    ],
)
def test_settings_that_peft_refuses_come_with_advice(model_type, settings, advised):
    config = tiny_config(model_type)
    settings = {"target_modules": "all-linear", **settings}
    with pytest.raises(ConfigError) as caught:
        plan_adapter(config, AdapterConfig(**settings))
    assert json.dumps(advised)[1:-1] in str(caught.value.hint).replace("adapter.", "")
    assert plan_adapter(config, AdapterConfig(**{**settings, **advised})).modules


def test_settings_that_contradict_each_other_are_refused():
    adapter = AdapterConfig(target_modules="all-linear", layers_to_transform=(0,))
    with pytest.raises(ConfigError, match="cannot be used when `target_modules` is a str"):
        plan_adapter(tiny_config("llama"), adapter)


@pytest.mark.parametrize("adapter", [None, AdapterConfig(modules_to_save=("lm_head",))])
def test_weights_are_not_trained_in_float16(llama, adapter):
    with pytest.raises(ConfigError, match=r"trained in float16") as caught:
        shards(llama, 0, 4, adapter=adapter, dtype="float16")
    assert "model.dtype" in str(caught.value.hint)
    over_float16 = shards(llama, 0, 4, adapter=AdapterConfig(), dtype="float16")
    assert {p.dtype for _, p in trainable_parameters(over_float16[0])} == {torch.float32}


def test_full_training_trains_every_weight_in_model_order(llama):
    parts = shards(llama, 0, 1, 4)
    found = [(part.parameter_index(n), n) for part in parts for n, _ in trainable_parameters(part)]
    assert [n for _, n in sorted(found)] == [n for n, _ in stock(llama).named_parameters()]


# -- adapter.init_from ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """An adapter that stock PEFT wrote, with weights other than its initial ones."""
    folder = tmp_path_factory.mktemp("adapter")
    targets = ["q_proj", "down_proj"]
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.05}
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **settings)
    model = get_peft_model(stock(llama), lora)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def test_continued_adapter_equals_pefts_own_loading(llama, saved):
    parts = shards(llama, 0, 1, 3, 4, adapter=AdapterConfig(init_from=str(saved)))
    model = stock_peft(llama, saved, is_trainable=True)
    assert torch.equal(chain_logits(parts), stock_logits(model))
    found = dict(item for part in parts for item in trainable_parameters(part))
    expected = {n.removeprefix(PREFIX): p for n, p in model.named_parameters() if p.requires_grad}
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert parts[0].adapter.plan.lora_config.r == 4


@pytest.mark.parametrize(
    "settings", [{"r": 8}, {"target_modules": ("q_proj",)}, {"lora_alpha": 8}, {"use_dora": True}]
)
def test_setting_that_contradicts_the_adapter_is_an_error(settings, config, saved):
    adapter = AdapterConfig(init_from=str(saved), **settings)
    with pytest.raises(ConfigError, match=f"adapter.{next(iter(settings))} is"):
        plan_adapter(config, adapter)


def test_agreeing_settings_and_another_dropout_pass(config, saved):
    agreeing: dict[str, Any] = {"r": 4, "target_modules": ("down_proj", "q_proj")}
    adapter = AdapterConfig(init_from=str(saved), lora_dropout=0.2, **agreeing)
    assert plan_adapter(config, adapter).lora_config.lora_dropout == 0.2


def test_defaults_written_out_are_no_contradiction(config, saved):
    text = AdapterConfig(init_from=str(saved)).model_dump_json()
    found = plan_adapter(config, AdapterConfig.model_validate_json(text)).lora_config
    assert (found.r, found.lora_dropout) == (4, 0.05)


def test_adapter_file_with_missing_or_foreign_tensors_is_refused(config, saved, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes((saved / "adapter_config.json").read_bytes())
    tensors = load_file(saved / "adapter_model.safetensors")
    key = f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight"
    tensor = tensors.pop(key)
    bias = key.replace("lora_A.weight", "lora_B.bias")
    norm = f"{PREFIX}model.norm.weight"
    scale = key.replace("lora_A.weight", "lora_magnitude_vector")
    adapter = AdapterConfig(init_from=str(tmp_path))
    for changed, said in (
        (tensors, "missing: .*layers.2"),
        ({**tensors, key: tensor, key.replace("2", "7"): tensor.clone()}, "no layer: .*layers.7"),
        ({**tensors, key: tensor[:2].contiguous()}, r"has shape \(2, 64\)"),
        ({**tensors, key: tensor, bias: tensor[0].clone()}, "lora_bias is true.*lora_B.bias"),
        ({**tensors, key: tensor, norm: tensor[0].clone()}, "modules_to_save.*norm.weight"),
        ({**tensors, key: tensor, scale: tensor[0].clone()}, "use_dora is true.*magnitude"),
    ):
        save_file(changed, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=said):
            plan_adapter(config, adapter)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("model", "targets"),
    spread(
        [(name, rows) for name in ("llama", "gemma") for rows in (96, 103)],
        [("q_proj",), ("q_proj", "embed_tokens")],
    ),
)
def test_adapter_with_embeddings_of_its_own_is_used_as_the_error_says(model, targets, tmp_path):
    model_type, rows = model
    base = save_model(tmp_path / "base", model_type)
    theirs = stock(base)
    theirs.resize_token_embeddings(rows)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(targets))
    model = get_peft_model(theirs, lora)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    adapter = AdapterConfig(init_from=str(tmp_path / "adapter"))
    if rows == 96 and "embed_tokens" in targets:  # PEFT saves them always, and they fit
        parts = shards(base, 0, 2, 4, adapter=adapter)
        assert torch.equal(chain_logits(parts), stock_logits(model))
        return
    with pytest.raises(ConfigError, match=rf"{rows} rows, the model's 96(.|\n)*unload\(\)"):
        plan_adapter(AutoConfig.from_pretrained(base), adapter)
    larger = stock(base)
    larger.resize_token_embeddings(rows)
    loaded = PeftModel.from_pretrained(larger, str(tmp_path / "adapter"))
    expected = stock_logits(loaded)  # PEFT leaves the head out where the embedding is a target
    loaded.save_pretrained(tmp_path / "without", save_embedding_layers=False)
    loaded.unload().save_pretrained(tmp_path / "larger")
    adapter = AdapterConfig(init_from=str(tmp_path / "without"))
    parts = shards(tmp_path / "larger", 0, 2, 4, adapter=adapter)
    assert torch.equal(chain_logits(parts), expected)


def test_adapter_directory_that_is_absent_or_broken_is_an_error(config, saved, tmp_path):
    adapter = AdapterConfig(init_from="adapter")
    with pytest.raises(ConfigError, match="no adapter in"):
        plan_adapter(config, adapter, tmp_path)
    (tmp_path / "adapter").mkdir()
    settings = (saved / "adapter_config.json").read_text()
    (tmp_path / "adapter" / "adapter_config.json").write_text(settings)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_adapter(config, adapter, tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("init_lora_weights", "new", 'adapter_config.json: init_lora_weights: .*"new"'),
        ("ensure_weight_tying", True, "the adapter uses ensure_weight_tying, which is not supp"),
        ("use_bdlora", {"nblocks": 2}, "the adapter uses use_bdlora"),
        ("trainable_token_indices", [1], "the adapter uses trainable_token_indices"),
        ("peft_type", "LOHA", "holds a LOHA adapter"),
        ("peft_type", "FOO", "holds a FOO adapter"),
        ("lora_alpha", "x", "adapter_config.json: lora_alpha: must be a number"),
        ("target_modules", 5, "adapter_config.json: target_modules"),
        ("rank_pattern", [1], "adapter_config.json: rank_pattern"),
    ],
)
def test_settings_of_a_saved_adapter_that_are_refused_by_every_reader(
    setting, value, reason, config, saved, tmp_path
):
    settings = json.loads((saved / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, setting: value}))
    weights = "adapter_model.safetensors"
    (tmp_path / weights).write_bytes((saved / weights).read_bytes())
    with pytest.raises(ConfigError, match=reason):
        plan_adapter(config, AdapterConfig(init_from=str(tmp_path)))
    with pytest.raises(ConfigError, match=reason):
        plan_saved_adapter(config, tmp_path)


# -- initial values that change the base --------------------------------------------------------


CONV1D = {"target_modules": ("c_attn",), "fan_in_fan_out": True}


@pytest.mark.parametrize(
    ("init", "model_type", "settings"),
    [
        ("pissa", "llama", {"target_modules": ("q_proj", "down_proj")}),
        ("olora", "llama", {"target_modules": "all-linear", "use_dora": True}),
        ("pissa", "gpt2", {**CONV1D, "use_rslora": True}),
    ],
)
def test_an_adapter_that_rewrites_the_base_is_pefts_under_any_cut(
    init, model_type, settings, tmp_path
):
    base = save_model(tmp_path / "base", model_type)
    adapter = AdapterConfig(r=4, init_lora_weights=init, **settings)
    parts = shards(base, 0, 1, 3, 4, adapter=adapter)
    theirs = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=init, **settings)
    model = get_peft_model(stock(base), theirs)
    model.train(False)
    assert torch.equal(chain_logits(parts), stock_logits(model))
    own = {name: p for part in parts for name, p in part.model.named_parameters()}
    for name, parameter in model.named_parameters():
        name = name.removeprefix(PREFIX)
        assert name not in own or torch.equal(own[name], parameter), name
    check_gradients(parts, model)

    randomise(parts)
    folder = write(tmp_path / "adapter", parts, base)
    assert torch.equal(chain_logits(parts), stock_logits(stock_peft(base, folder)))
    again = shards(base, 0, 2, 4, adapter=AdapterConfig(init_from=str(folder)))
    assert torch.equal(chain_logits(again), chain_logits(parts))
    plan = again[0].adapter
    own = AdapterConfig(init_from=str(folder), autocast_adapter_dtype=False)
    explicit = explicit_settings(own, plan.plan)
    assert (explicit.init_lora_weights, explicit.autocast_adapter_dtype) == (init, False)
    # Blocks whose weights were rewritten are not those of the files.
    assert not parts[1].dissolve().blocks


@pytest.mark.parametrize(
    ("model_type", "changes", "settings", "said"),
    [
        ("gpt2", {}, {"init_lora_weights": "olora", **CONV1D}, "c_attn, which stores its weight"),
        ("mixtral", {}, {"target_parameters": ("mlp.gate.weight",)}, "with target_parameters"),
        ("mixtral", {}, {"init_lora_weights": "olora", "target_modules": "all-linear"},
         r"not supported with target_parameters.*\n.*all-linear"),
        ("llama", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
         {"target_modules": ("q_proj",)}, "which quantised ones would round away"),
        ("llama", {"tie_word_embeddings": True}, {"target_modules": ("lm_head",)},
         r"embedding and head, which are one weight \(lm_head\)"),
    ],
)  # fmt: skip
def test_a_base_that_cannot_be_rewritten_is_refused(model_type, changes, settings, said):
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=said):
        plan_adapter(config, AdapterConfig(**{"init_lora_weights": "pissa", **settings}))


def test_an_embedding_that_is_not_tied_can_be_rewritten():
    embedding = AdapterConfig(init_lora_weights="pissa", target_modules=("embed_tokens",))
    assert plan_adapter(tiny_config("llama"), embedding).modules == ("model.embed_tokens",)


# -- the finished directory -----------------------------------------------------------------------


def test_incomplete_adapter_is_never_written(llama, tmp_path):
    parts = shards(llama, 0, 1, 3, 4, adapter=AdapterConfig())
    tensors, plan = [dict(export_parts(part)) for part in parts], parts[0].adapter.plan
    for given, said in (
        (tensors[:1] + tensors[2:], r"8 missing tensors: .*layers\.1\."),
        (tensors + tensors[:1], "two stages"),
        (tensors + [{"else": torch.zeros(1)}], "does not have: else"),
    ):
        with pytest.raises(CheckpointError, match=said):
            write_adapter(OutputDirectory(tmp_path / "adapter"), given, plan, str(llama))
        assert list(tmp_path.iterdir()) == []
