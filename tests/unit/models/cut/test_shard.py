from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import random
import re
import socket
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hetero_framework.config import ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.errors import ArchitectureError, DeviceError, ModelError
from hetero_framework.models.cut import attention, partition
from hetero_framework.models.cut import shard as shard_module
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import AfterBlocks, PassThrough
from hetero_framework.models.cut.shard import (
    Checkpoint,
    Shard,
    ShardRange,
    build_shard,
    load_shard,
)
from hetero_framework.models.cut.side import Bundle, crossing
from hetero_framework.models.cut.tiny import probe_inputs, tiny_config
from hetero_framework.models.files import weights
from hetero_framework.models.files.source import ModelSource
from tests.cases import spread
from tests.reads import note_reads
from tests.samples import save_llama
from tests.unit.adapter_helpers import chain_loss, ranges

ITEMS = torch.tensor(21)
WHOLE = ShardRange(0, 6, True, True)
CUTS = {
    "one shard": [0, 6],
    "two shards": [0, 3, 6],
    "embedding alone": [0, 0, 2, 6],
    "head alone": [0, 1, 5, 6, 6],
}


@functools.lru_cache
def config_of(model_type: str) -> Any:
    return tiny_config(model_type)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function that gives the directory of a tiny random checkpoint, several files each."""

    @functools.lru_cache
    def make(model_type: str) -> Path:
        path = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config_of(model_type))
        model.save_pretrained(path, max_shard_size="60KB")
        return path

    return make


def build(model_type: str, path: Path | None, bounds: list[int], **kwargs: Any) -> list[Shard]:
    checkpoint = None if path is None else Checkpoint(str(path))
    return [build_shard(config_of(model_type), checkpoint, r, **kwargs) for r in ranges(*bounds)]


def run(
    shards: list[Shard], inputs: dict[str, torch.Tensor], half: torch.dtype | None = None
) -> tuple[torch.Tensor, dict]:
    """Loss and all gradients, in autocast to `half`; gradients of a tied weight are summed under
    the embedding's name."""
    loss = chain_loss(shards, inputs, lambda given: shards[-1].loss(inputs, given, ITEMS), half)
    gradients: dict[str, torch.Tensor] = {}
    for shard in shards:
        for name, parameter in shard.model.named_parameters():
            if parameter.grad is not None:
                assert name not in gradients
                gradients[name] = parameter.grad
    for target, source in shards[-1].ties.items():
        gradients[source] += gradients.pop(target)
    return loss, gradients


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def autocast(half: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", half, enabled=half is not None)


@functools.lru_cache
def whole(model_type: str, path: Path) -> tuple[torch.Tensor, dict]:
    model = AutoModelForCausalLM.from_pretrained(path)
    inputs = probe_inputs(config_of(model_type))
    output = model(**inputs, num_items_in_batch=ITEMS, use_cache=False)
    output.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients


@pytest.mark.parametrize("cut", CUTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_cut_model_equals_the_whole_to_the_bit(model_type, cut, checkpoints):
    path = checkpoints(model_type)
    expected_loss, expected = whole(model_type, path)
    loss, gradients = run(build(model_type, path, CUTS[cut]), probe_inputs(config_of(model_type)))
    assert torch.equal(loss, expected_loss)
    assert_equal(gradients, expected)


def test_cut_equals_whole_in_bfloat16(checkpoints):
    path, inputs = checkpoints("llama"), probe_inputs(config_of("llama"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    expected = model(**inputs, num_items_in_batch=ITEMS, use_cache=False).loss
    for bounds in CUTS.values():
        loss, _ = run(build("llama", path, bounds, dtype=torch.bfloat16), inputs)
        assert torch.equal(loss, expected)


# Blocks that read the hidden state several times without a norm before, and one with side tensors.
@pytest.mark.parametrize(
    ("model_type", "half"),
    spread(
        ["llama", "olmo2", "exaone4", "gemma3n_text"],
        {"bf16": torch.bfloat16, "fp16": torch.float16},
    ),
)
def test_cut_equals_whole_in_autocast(half, model_type, checkpoints):
    path, inputs = checkpoints(model_type), probe_inputs(config_of(model_type))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with autocast(half):
        expected = model(**inputs, num_items_in_batch=ITEMS, use_cache=False).loss
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for checkpointing in (False, True):
        shards = build(model_type, path, [0, 2, 5, 6], dtype=torch.float32)
        for shard in shards if checkpointing else ():
            shard.recompute_blocks()
            for block in shard._blocks:
                block.training = True  # not what is in it: no dropout
        loss, found = run(shards, inputs, half)
        assert torch.equal(loss, expected)
        assert_equal(found, gradients)
    received: Bundle = ()
    with torch.no_grad(), autocast(half):
        for shard in shards[:-1]:
            received = crossing(shard.forward(inputs, received))
        assert torch.equal(shards[-1].loss(inputs, received, ITEMS), expected)


def test_position_ids_reach_every_shard(checkpoints):
    inputs = probe_inputs(config_of("llama"))
    shifted = {**inputs, "position_ids": torch.arange(12).expand(2, 12) * 3}
    one = build("llama", checkpoints("llama"), [0, 6])
    cut = build("llama", checkpoints("llama"), [0, 2, 6])
    assert torch.equal(run(one, shifted)[0], run(cut, shifted)[0])
    assert not torch.equal(run(one, shifted)[0], run(one, inputs)[0])


def test_shard_holds_only_its_layers_under_global_names(checkpoints):
    expected = set(AutoModelForCausalLM.from_pretrained(checkpoints("llama")).state_dict())
    shards = build("llama", checkpoints("llama"), [0, 2, 5, 6])
    held = [{name for name, _ in s.model.named_parameters()} for s in shards]
    assert set().union(*held) == expected
    assert sum(map(len, held)) == len(expected)
    assert {n.split(".")[2] for n in held[1]} == {"2", "3", "4"}
    there = dict(shards[1].model.named_modules())
    assert isinstance(there["model.layers.0"], PassThrough)
    assert isinstance(there["lm_head"], AfterBlocks)
    assert not isinstance(there["model.layers.3"], PassThrough)


def test_rank_restores_the_whole_models_order(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("gpt2"))
    shards = build("gpt2", checkpoints("gpt2"), [0, 2, 5, 6])
    ranked = [(s.parameter_index(n), n) for s in shards for n, _ in s.model.named_parameters()]
    random.Random(0).shuffle(ranked)
    merged = [name for _, name in sorted(ranked)]
    assert merged == [*[n for n, _ in model.named_parameters()], "lm_head.weight"]
    lora = "transformer.h.3.attn.c_attn.lora_A.default.weight"
    around = "transformer.h.3.attn.c_attn.bias", lora, "transformer.h.3.attn.c_proj.weight"
    places = [shards[0].parameter_index(name) for name in around]
    assert places == sorted(set(places))


def test_tied_weight_is_two_parameters(checkpoints):
    (alone,) = build("gpt2", checkpoints("gpt2"), [0, 6])
    embedding = alone.model.get_parameter("transformer.wte.weight")
    head = alone.model.get_parameter("lm_head.weight")
    assert alone.ties == {"lm_head.weight": "transformer.wte.weight"}
    assert alone.tied_elsewhere == set()
    assert embedding is not head
    assert embedding.data_ptr() == head.data_ptr()

    first, last = build("gpt2", checkpoints("gpt2"), [0, 3, 6])
    assert torch.equal(last.model.get_parameter("lm_head.weight"), embedding)
    assert "transformer.wte.weight" not in dict(last.model.named_parameters())
    assert "lm_head.weight" not in dict(first.model.named_parameters())
    (untied,) = build("llama", checkpoints("llama"), [0, 6])
    assert (untied.ties, untied.tied_elsewhere) == ({}, set())


def test_random_weights_do_not_depend_on_the_cut():
    for model_type in ("gpt2", "mixtral", "mamba"):
        held: dict[str, torch.Tensor] = {}
        for shard in build(model_type, None, [0, 2, 5, 6], seed=5):
            held.update(shard.model.state_dict())
        (alone,) = build(model_type, None, [0, 6], seed=5)
        assert_equal(held, alone.model.state_dict())


def test_random_weights_depend_on_the_seed_and_follow_the_models_own_rule():
    (one,), (other,) = build("gpt2", None, [0, 6], seed=5), build("gpt2", None, [0, 6], seed=6)
    name = "transformer.h.1.mlp.c_fc.weight"
    weight = one.model.get_parameter(name)
    assert not torch.equal(weight, other.model.get_parameter(name))
    assert not torch.equal(weight, one.model.get_parameter(name.replace("1", "2")))
    assert weight.std().item() == pytest.approx(config_of("gpt2").initializer_range, rel=0.1)
    assert torch.equal(one.model.get_parameter("transformer.ln_f.weight"), torch.ones(64))


def seed_by_place(place: str | int) -> None:
    torch.manual_seed(1000 + place if isinstance(place, int) else len(place))


# XLNet drops of its positions, too.
@pytest.mark.parametrize(
    ("model_type", "alpha"), spread(["gpt2", "xlnet"], {"noise": 5.0, "no noise": None})
)
def test_dropout_and_noise_do_not_depend_on_the_cut_nor_on_recomputing(
    model_type, alpha, checkpoints
):
    inputs = probe_inputs(config_of(model_type))
    results = []
    # XLNet asks its parts for the type of their weights, and its head alone has none there.
    names = [name for name in CUTS if (model_type, name) != ("xlnet", "head alone")]
    for name, checkpointing in itertools.product(names, (False, True)):
        shards = build(model_type, checkpoints(model_type), CUTS[name])
        for shard in shards:
            shard.train(True)
            shard.on_enter = seed_by_place
            if alpha is not None:
                shard.add_noise(alpha)
            if checkpointing:
                shard.recompute_blocks()
        results.append(run(shards, inputs))
    loss, gradients = results[0]
    assert not torch.equal(loss, whole(model_type, checkpoints(model_type))[0])
    for other_loss, other in results[1:]:
        assert torch.equal(other_loss, loss)
        assert_equal(other, gradients)


def test_noise_is_uniform_within_its_bound_and_in_training_only(checkpoints):
    (shard,) = build("llama", checkpoints("llama"), [0, 6])
    ids_BS = torch.arange(64).reshape(2, 32) % 60
    embedding = shard.model.get_input_embeddings()
    embedding.requires_grad_(False)
    plain_BSD = embedding(ids_BS)
    shard.add_noise(5.0)
    shard.on_enter = seed_by_place
    shard.train(False)
    assert torch.equal(embedding(ids_BS), plain_BSD)
    shard.train(True)
    noise_BSD = embedding(ids_BS) - plain_BSD
    assert torch.equal(embedding(ids_BS) - plain_BSD, noise_BSD)
    bound = 5.0 / (32 * plain_BSD.shape[-1]) ** 0.5
    assert 0.95 * bound < float(noise_BSD.abs().max()) <= bound * (1 + 1e-5)
    # Of a uniform distribution: its mean is 0 and its deviation bound / sqrt(3).
    assert abs(float(noise_BSD.mean())) < 0.1 * bound
    assert float(noise_BSD.std()) == pytest.approx(bound / 3**0.5, rel=0.05)


def test_places_are_announced_once_and_in_order(checkpoints):
    seen: list[str | int] = []
    inputs = probe_inputs(config_of("llama"))
    shards = build("llama", checkpoints("llama"), [0, 0, 4, 6, 6])
    for shard in shards:
        shard.on_enter = seen.append
    run(shards, inputs)
    begins = "embedding"  # in each shard
    assert seen == [begins, begins, 0, 1, 2, 3, begins, 4, 5, begins, "head"]


@pytest.fixture
def reads(monkeypatch):
    """The tensors that are read, and the files that are opened."""
    read: set[str] = set()
    opened: set[str] = set()
    note_reads(monkeypatch, read.add)
    noted = weights._open
    monkeypatch.setattr(weights, "_open", lambda path: (opened.add(path.name), noted(path))[1])
    return read, opened


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_only_own_tensors_are_read_and_only_their_files_opened(model_type, checkpoints, reads):
    read, opened = reads
    path = checkpoints(model_type)
    files = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    own = {name for name in files if name.startswith(("model.layers.2.", "model.layers.3."))}
    build_shard(config_of(model_type), Checkpoint(str(path)), ShardRange(2, 4, False, False))
    assert read == own
    assert opened == {files[name] for name in own}
    assert opened < set(files.values())


def test_single_file_is_read_by_tensor(tmp_path, checkpoints, reads):
    source = checkpoints("gpt2")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path)
    read, _ = reads
    build_shard(config_of("gpt2"), Checkpoint(str(tmp_path)), ShardRange(5, 6, False, True))
    blocks = {name for name in load_file(tmp_path / "model.safetensors") if ".h.5." in name}
    ends = {"transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.wte.weight"}
    assert read == blocks | ends


def test_from_the_hub_only_needed_files_are_asked_for(checkpoints, monkeypatch):
    path = checkpoints("llama")
    asked: list[tuple[str, str, str | None]] = []

    def fake_hub(repo: str, filename: str, revision: str | None = None, **_: Any) -> str | None:
        asked.append((repo, filename, revision))
        return str(path / filename) if (path / filename).exists() else None

    monkeypatch.setattr(weights, "cached_file", fake_hub)
    checkpoint = Checkpoint("somebody/tiny", "v2")
    build_shard(config_of("llama"), checkpoint, ShardRange(0, 1, True, False))
    index = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    own = ("model.layers.0.", "model.embed_tokens.")
    needed = {file for name, file in index.items() if name.startswith(own)}
    assert {repo for repo, _, _ in asked} == {"somebody/tiny"}
    assert {revision for _, _, revision in asked} == {"v2"}
    looked_for = {"config.json", "adapter_config.json"}
    looked_for |= {"model.safetensors", "model.safetensors.index.json"}
    assert {file for _, file, _ in asked} == needed | looked_for
    assert needed < set(index.values())


def config_in(settings: ModelConfig, folder: Path) -> Any:
    return ModelSource(settings, folder).config


def load(settings: ModelConfig, folder: Path, rng: ShardRange, seed: int = 0) -> Any:
    return load_shard(settings, folder, rng, open_device("cpu"), seed=seed).model


def test_load_shard_takes_dtype_of_checkpoint_or_section(tmp_path, checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    rng = ShardRange(0, 2, True, False)
    assert load(ModelConfig(name_or_path="half"), tmp_path, rng).dtype == torch.bfloat16
    settings = ModelConfig(name_or_path="half", dtype="float32")
    assert load(settings, tmp_path, rng).dtype == torch.float32


def test_load_shard_from_config_uses_the_seed(tmp_path):
    fields = {k: v for k, v in config_of("llama").to_dict().items() if k != "dtype"}
    settings = ModelConfig(from_config=fields)
    rng = ShardRange(2, 3, False, False)
    one, same, other = (load(settings, tmp_path, rng, seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert introspect(config_in(settings, tmp_path)).num_layers == 6


def test_attention_implementation_is_respected(checkpoints, tmp_path):
    rng = ShardRange(0, 1, True, False)
    for name, expected in (("eager", "eager"), (None, "sdpa")):
        settings = ModelConfig(name_or_path=str(checkpoints("llama")), attn_implementation=name)
        assert load(settings, tmp_path, rng).config._attn_implementation == expected


def test_missing_directory_names_path_and_host(tmp_path):
    with pytest.raises(ModelError) as caught:
        config_in(ModelConfig(name_or_path="./nowhere"), tmp_path)
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert socket.gethostname() in str(caught.value)


def test_bin_checkpoint_is_refused(tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match="safetensors"):
        Checkpoint(str(tmp_path))


REFUSED: list[dict[str, Any]] = [
    {"attn_implementation": "kernels-community/flash-attn2"},
    {"_attn_implementation": {"": "kernels-community/flash-attn2"}},
    {"experts_implementation": "somebody/experts"},
    {"auto_map": {"AutoModelForCausalLM": "x--y.Z"}},
    {"auto_map": None},
    {"text_config": {"auto_map": ["x--y.Z"]}},
    {"vision_config": {"attn_implementation": "somebody/kernel"}},
    {"trust_remote_code": True},
    {"quantization_config": {"quant_method": "hqq", "bits": 4}},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 1e30},
    {"vision_config": {"depth": 10**9}},
    {"num_labels": 10**9},
    {"num_hidden_layers": "six"},
    {"num_hidden_layers": None, "vocab_size": []},
    {"rope_parameters": 7},
    {"text_config": 7},
    {"decoder": [1]},
]


@pytest.mark.parametrize("named", ["in place", "folder"])
@pytest.mark.parametrize("more", REFUSED, ids=lambda more: json.dumps(more)[:50])
def test_settings_of_models_pass_one_gate(more, named, tmp_path):
    fields = {**config_of("llama").to_dict(), **more}
    if named == "in place":
        section, place = ModelConfig(from_config=fields), "model.from_config"
    else:
        (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        section, place = ModelConfig(name_or_path=str(tmp_path)), str(tmp_path)
    with pytest.raises(ModelError, match=re.escape(place)) as caught:
        config_in(section, tmp_path)
    assert caught.value.exit_code == 2


def test_no_kernel_stands_in_for_a_package(monkeypatch):
    """transformers would take one of the hub's; see `_check_and_adjust_attn_implementation`."""
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    fields, own = config_of("llama").to_dict(), {"_attn_implementation": "flash_attention_2"}
    for asked in (
        ModelConfig(from_config=fields, attn_implementation="flash_attention_2"),
        ModelConfig(from_config={**fields, **own}),
    ):
        with pytest.raises(DeviceError, match="the package flash-attn is not installed"):
            config_in(asked, Path())


def test_a_hub_name_is_not_read_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="where this process was started"):
        config_in(ModelConfig(name_or_path="org/name"), tmp_path / "job")


def test_broken_configuration_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError):
        config_in(ModelConfig(name_or_path=str(tmp_path)), tmp_path)
    with pytest.raises(ModelError, match="from_config"):
        config_in(ModelConfig(from_config={"model_type": "no_such"}), tmp_path)


def test_weights_of_another_shape_than_the_configuration_are_named(checkpoints):
    config, path = copy.deepcopy(config_of("llama")), checkpoints("llama")
    config.intermediate_size *= 2
    text = r"layers\.0\.mlp\.\w+\.weight of .* has the shape \["
    with pytest.raises(ModelError, match=text) as raised:
        build_shard(config, Checkpoint(str(path)), WHOLE)
    assert raised.value.exit_code == 2


def test_missing_tensor_is_named(tmp_path, checkpoints):
    AutoModelForCausalLM.from_pretrained(checkpoints("llama")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.4.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(str(tmp_path))
    build_shard(config_of("llama"), checkpoint, ShardRange(0, 3, True, False))
    with pytest.raises(ModelError, match=r"model\.layers\.4\.mlp\.up_proj\.weight"):
        build_shard(config_of("llama"), checkpoint, ShardRange(3, 6, False, True))


def test_the_weight_of_the_routers_loss_can_be_set_and_turned_off():
    def loaded(model_type: str, **section: Any) -> Any:
        fields = {**tiny_config(model_type).to_dict(), "router_aux_loss_coef": 0.25}
        return config_in(ModelConfig(from_config=fields, **section), Path())

    assert not loaded("mixtral").output_router_logits
    on = loaded("mixtral", router_aux_loss_coef=0.5)
    assert (on.output_router_logits, on.router_aux_loss_coef) == (True, 0.5)
    assert not loaded("mixtral", router_aux_loss_coef=0).output_router_logits
    with pytest.raises(ModelError, match=r"is 0\.5, but a llama model has no router_aux_loss_coef"):
        loaded("llama", router_aux_loss_coef=0.5)


def test_a_loss_of_routers_that_counts_no_items_is_refused(monkeypatch):
    config = tiny_config("mixtral")
    config.output_router_logits = True
    found = replace(introspect(config), loss_counts_items=False)
    monkeypatch.setattr(partition, "_skeletons", {})
    monkeypatch.setattr(partition, "introspect", lambda config: found)
    with pytest.raises(ArchitectureError, match="not a sum over tokens and what the routers add"):
        build_shard(config, None, WHOLE)


def test_absent_routers_report_received_logits_to_their_hooks():
    config = tiny_config("jetmoe")
    config.output_router_logits = True
    if not introspect(config).reports:
        pytest.skip("before 5.23 transformers makes no loss of the logits of jetmoe's routers")
    shard = build_shard(config, None, ShardRange(3, 6, False, True))
    absent = shard.model.model.layers[1]
    # Until a model needs them they are no modules of it, and they have no weights to load.
    assert not any("layers.1." in name for name in shard.model.state_dict())
    outer, inner = "self_attention", "self_attention.experts.router"
    heard = []
    for name in (outer, inner):
        hook = functools.partial(lambda name, *call: heard.append((name, call[-1])), name)
        absent.get_submodule(name).register_forward_hook(hook)
    absent.report(inner, (None, 3))
    absent.report(outer, 4)
    assert heard == [(inner, (None, 3)), (outer, 4)]
    assert "forward" not in vars(absent.get_submodule(inner))


def test_models_that_couple_all_layers_are_refused():
    config = tiny_config("llama4_text")
    config.output_router_logits = True
    with pytest.raises(ArchitectureError, match="transformers makes no loss of its routers"):
        build_shard(config, None, ShardRange(0, 3, True, False))
    config = tiny_config("opt")
    config.layerdrop = 0.1
    with pytest.raises(ArchitectureError, match="layerdrop"):
        build_shard(config, None, ShardRange(0, 3, True, False))


def test_weights_that_layers_share_are_parameters_of_each_layer():
    """The later layer's are read from where the checkpoint has them; drawn, they are the same."""
    config = tiny_config("zamba2")
    name = "model.layers.{}.shared_transformer.self_attn.q_proj.weight".format
    alone = build_shard(config, None, WHOLE)
    first = build_shard(config, None, ShardRange(0, 5, True, False))
    last = build_shard(config, None, ShardRange(5, 6, False, True))
    here, there = (alone.model.get_parameter(name(k)) for k in (2, 5))
    assert here is not there
    assert here.data_ptr() == there.data_ptr()
    assert torch.equal(first.model.get_parameter(name(2)), here)
    assert torch.equal(last.model.get_parameter(name(5)), here)
    assert name(2) not in dict(last.model.named_parameters())
    assert last.ties[name(5)] == name(2)
    assert (name(2) in first.tied_elsewhere, name(2) in alone.tied_elsewhere) == (True, False)


def test_weights_that_layers_share_and_the_library_does_not_tie_are_refused(monkeypatch):
    config = tiny_config("zamba2")
    monkeypatch.setattr(partition, "_skeletons", {})
    monkeypatch.setattr(partition, "tied_names", lambda model: {})
    with pytest.raises(ArchitectureError, match=r"shared_transformer.* shared by layers \[2, 5\]"):
        build_shard(config, None, ShardRange(0, 3, True, False))


def test_anatomy_places_parts_by_use():
    gpt2 = introspect(config_of("gpt2"))
    assert gpt2.blocks == "transformer.h"
    assert gpt2.owner["transformer.wpe.weight"] == -1
    assert gpt2.owner["transformer.ln_f.weight"] == 6
    assert gpt2.owner["lm_head.weight"] == 6
    bloom = introspect(tiny_config("bloom"))
    assert bloom.owner["transformer.word_embeddings_layernorm.weight"] == -1


def test_shards_built_in_two_threads_leave_the_library_as_it_was(tmp_path):
    """Two loads at once would swap transformers' own methods for good; models then stay untied."""
    folder = save_llama(tmp_path / "model", layers=2, tie_word_embeddings=True)
    config = AutoConfig.from_pretrained(folder)
    before = PreTrainedModel.tie_weights

    def build() -> None:
        for _ in range(5):
            build_shard(config, Checkpoint(str(folder)), ShardRange(0, 2, True, True))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert PreTrainedModel.tie_weights is before


def test_recompute_draws_again_where_torch_saves_no_state(monkeypatch):
    """As on a device that `torch.utils.checkpoint` does not know: only seeding repeats a draw."""
    real = shard_module.checkpoint
    saved = []

    def without_state(
        function: Any, *args: Any, preserve_rng_state: bool = True, **rest: Any
    ) -> Any:
        saved.append(preserve_rng_state)
        return real(function, *args, preserve_rng_state=False, **rest)

    monkeypatch.setattr(shard_module, "checkpoint", without_state)
    config = config_of("gpt2")
    assert config.resid_pdrop > 0
    found = []
    for recompute in (False, True):
        shard = build_shard(config, None, WHOLE, dtype=torch.float32)
        shard.on_enter = seed_by_place
        if recompute:
            shard.recompute_blocks()
        shard.train()
        found.append(run([shard], probe_inputs(config)))
    (loss, gradients), (again, recomputed) = found
    assert torch.equal(loss, again)
    assert_equal(recomputed, gradients)
    assert saved == [False] * 6


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("bounds", [(0, 6), (0, 3), (2, 4), (3, 6), (6, 6)])
def test_dropped_shard_is_freed_without_the_garbage_collector(model_type, bounds):
    start, end = bounds
    rng = ShardRange(start, end, start == 0, end == 6)
    shard = build_shard(config_of(model_type), None, rng, dtype=torch.float32)
    shard.recompute_blocks()
    if rng.is_first and rng.is_last:
        shard.train()
        shard.loss(probe_inputs(shard.config), (), ITEMS).backward()
    gc.disable()
    try:
        left = [weakref.ref(parameter) for parameter in shard.model.parameters()]
        left += [weakref.ref(shard), weakref.ref(shard.model)]
        del shard
        assert [reference() for reference in left] == [None] * len(left)
    finally:
        gc.enable()
