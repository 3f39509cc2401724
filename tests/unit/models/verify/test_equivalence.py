from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from hetero_framework.config import AdapterConfig
from hetero_framework.core.cache import cache_directory
from hetero_framework.errors import ArchitectureError, ConfigError
from hetero_framework.models.adapters.lora import plan_adapter
from hetero_framework.models.cut import partition
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import Shard, ShardRange
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.verify import equivalence
from hetero_framework.models.verify.equivalence import (
    Comparison,
    admit,
    admit_adapter,
    compare,
)
from tests.cases import seldom


def verified(model_type: str, cuts: Sequence[int] = (2, 5)) -> Comparison:
    config = tiny_config(model_type)
    return compare(config, ranges_between([0, *cuts, introspect(config).num_layers]))


PASSING = "llama gemma3_text mixtral gpt_oss deepseek_v3 gpt2 falcon_h1 gemma3n_text xlm"
MORE = """qwen3_next granite opt bloom roformer mamba deepseek_v4 gemma4_text hy_v4 inkling2_text
qwen4_exp_text zaya"""


@pytest.mark.parametrize("model_type", seldom([*PASSING.split(), *MORE.split()], *MORE.split()))
def test_architecture_passes_to_the_bit(model_type):
    result = verified(model_type)
    assert (result.verdict, result.reason, result.half) == ("bit-equal", "", "")
    assert len(result.stages) == 3


NO_NORM = "olmo3 exaone4 flex_olmo bart roberta electra"
ROUTERS = """deepseek_v4 ernie4_5_moe flex_olmo flint gpt_oss granitemoe granitemoe_swa
granitemoehybrid granitemoeshared jamba laguna mellum minimax minimax_m2 minimax_m3_vl_text olmoe
phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text"""


@pytest.mark.parametrize(
    "model_type", seldom(["mixtral", "jetmoe", *ROUTERS.split()], *ROUTERS.split())
)
def test_the_loss_of_all_routers_passes_to_the_bit(model_type):
    config: Any = tiny_config(model_type)
    config.output_router_logits = True
    weight = {"jetmoe": "aux_loss_coef"}.get(model_type, "router_aux_loss_coef")
    setattr(config, weight, 0.5)
    assert introspect(config).reports
    result = compare(config, ranges_between([0, 2, 5, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


@pytest.mark.parametrize(
    "model_type", seldom(["olmo2", "bert", *NO_NORM.split()], *NO_NORM.split())
)
def test_blocks_that_read_their_input_twice_are_bit_equal_in_autocast(model_type, monkeypatch):
    assert verified(model_type).half == ""
    monkeypatch.setattr("hetero_framework.models.cut.shard.as_inner", lambda received: received)
    assert "differs by" in verified(model_type).half


@pytest.mark.long
def test_weights_of_several_layers_are_summed_in_more_bits_than_in_the_whole():
    """There all uses share one narrow copy."""
    result = verified("zamba2")
    assert (result.verdict, result.gradient_difference) == ("bit-equal", 0)
    assert re.search(r"differs by .*e-03 .* most in .*shared_transformer", result.half)


def test_names_of_one_weight_are_told_apart_by_the_modules_that_run():
    """ProphetNet ties the head and the decoder's embedding to one that never runs."""
    config = tiny_config("prophetnet")
    owner = introspect(config).owner
    assert owner["prophetnet.decoder.word_embeddings.weight"] == -1
    assert owner["lm_head.weight"] == 6
    result = compare(config, ranges_between([0, 3, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


@pytest.mark.parametrize("cuts", [[0], pytest.param([0, 1, 4], marks=pytest.mark.long)])
def test_tensors_made_between_blocks_stay_with_their_hidden_state(cuts):
    """Else its gradient would come back apart from that of the hidden state."""
    assert verified("inkling2_text", cuts).verdict == "bit-equal"


@pytest.mark.parametrize(
    ("factor", "verdict", "reason"),
    [(1.001, "refused", "differ"), (1 + 1e-7, "within tolerance", "")],
    ids=["changed", "last bit"],
)
def test_changed_hidden_state_is_noticed_and_its_last_bit_tolerated(
    factor, verdict, reason, monkeypatch
):
    forward = Shard.forward

    def changed(self: Shard, *args: Any) -> Bundle:
        return tuple(tensor * factor for tensor in forward(self, *args))

    monkeypatch.setattr(Shard, "forward", changed)
    result = verified("llama")
    assert result.verdict == verdict
    assert reason in result.reason
    assert verdict == "refused" or 0 < result.gradient_difference < 1e-4


def test_gradients_of_later_steps_are_compared(monkeypatch):
    forward, calls = Shard.forward, []

    def rounded(self: Shard, *args: Any) -> Bundle:
        calls.append(self.range)
        factor = 1 + 1e-7 * (len(calls) > 6)  # after one in bfloat16, the last step of three
        return tuple(tensor * factor for tensor in forward(self, *args))

    monkeypatch.setattr(Shard, "forward", rounded)
    result = compare(tiny_config("llama"), ranges_between([0, 2, 5, 6]))
    assert len(calls) == 8
    assert result.verdict == "within tolerance"
    assert 0 < result.gradient_difference < 1e-4


def test_admit_raises_with_the_reason(monkeypatch):
    monkeypatch.setattr(partition, "tied_names", lambda model: {})
    with pytest.raises(ArchitectureError, match="shared_transformer"):
        admit(tiny_config("zamba2"), ranges_between([0, 3, 6]))


def test_blocks_that_share_weights_in_turn_are_equal_under_any_cut():
    """Two weights, of layers 1, 3 and 5 and of layers 2 and 4."""
    kinds = ["linear_attention", *["hybrid"] * 5]
    config = tiny_config("zamba2")
    changes = {"layers_block_type": kinds, "hybrid_layer_ids": [1, 2, 3, 4, 5]}
    config = type(config).from_dict({**config.to_dict(), **changes, "num_mem_blocks": 2})
    result = compare(config, ranges_between([0, 2, 4, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


@pytest.mark.parametrize(
    ("model_type", "module"),
    [("llama4_text", "router"), pytest.param("deepseek_v4", "o_a_proj", marks=pytest.mark.long)],
)
def test_an_adapter_of_a_module_that_is_not_linear_is_refused(model_type, module):
    """Their classes are linear layers to PEFT; what they take or return is another thing."""
    config, settings = tiny_config(model_type), {"target_modules": "all-linear"}
    text = rf"does not run with this adapter: .*{module} fails"
    with pytest.raises(ConfigError, match=text) as e:
        admit_adapter(config, plan_adapter(config, AdapterConfig(**settings)))
    assert e.value.hint == f'set "adapter.exclude_modules": ["{module}"]'
    advised = AdapterConfig(exclude_modules=(module,), **settings)
    admit_adapter(config, plan_adapter(config, advised))


def test_admit_takes_any_plan_of_a_large_model():
    config = LlamaConfig(num_hidden_layers=10, tie_word_embeddings=True)
    for bounds in ([0, 0, 7, 10], [0, 10]):
        assert admit(config, ranges_between(bounds)).verdict == "bit-equal"


def test_a_stage_without_the_weights_that_a_model_asks_for_is_refused():
    """XLNet asks the part that has its layers for the type of its weights."""
    result = verified("xlnet", [6])
    assert "a shard does not run alone" in result.reason


def test_compare_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compare(tiny_config("llama"), ranges_between([0, 3, 6]))
    assert list(tmp_path.iterdir()) == []


# -- what is remembered ---------------------------------------------------------------------------


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """The cuts that were compared; what passed is kept in a directory of the test."""
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    asked: list[tuple[ShardRange, ...]] = []
    real = equivalence.compare

    def counted(config: PretrainedConfig, ranges: Any, *more: Any) -> Comparison:
        asked.append(tuple(ranges))
        return real(config, ranges, *more)

    monkeypatch.setattr(equivalence, "compare", counted)
    return asked


def test_verdict_is_computed_once_for_an_architecture_and_a_cut(compared, monkeypatch):
    config, cut = tiny_config("llama"), ranges_between([0, 3, 6])
    assert admit(config, cut).verdict == admit(config, cut).verdict == "bit-equal"
    assert len(compared) == 1
    admit(config, ranges_between([0, 2, 6]))
    assert len(compared) == 2
    config.hidden_act = "gelu"
    admit(config, cut)
    assert len(compared) == 3
    monkeypatch.setattr(equivalence.transformers, "__version__", "9.9")
    admit(config, cut)
    assert len(compared) == 4


def test_refusal_is_never_remembered(compared, monkeypatch):
    refused = Comparison("llama", "refused", "it leaks")
    monkeypatch.setattr(equivalence, "compare", lambda *_: refused)
    for _ in range(2):
        with pytest.raises(ArchitectureError, match="it leaks"):
            admit(tiny_config("llama"), ranges_between([0, 3, 6]))
    directory = cache_directory()
    assert not directory.exists()


def test_a_remembered_verdict_depends_on_all_code(monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or b"")
    equivalence.own_code.__wrapped__(Path(equivalence.__file__).parents[1])
    assert {"shard.py", "lora.py", "weights.py", "equivalence.py", "library.py"} <= {*read}
