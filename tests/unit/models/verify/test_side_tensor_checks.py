"""The side tensors that a stage expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_framework.config import AdapterConfig, TrainingConfig
from hetero_framework.models.adapters.lora import plan_adapter
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Shard, build_shard
from hetero_framework.models.cut.side import Bundle, crossing
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.verify import side_tensor_checks
from hetero_framework.models.verify.side_tensor_checks import SideTensorChecks

ROWS, TOKENS = 3, 5
IDS = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) + 3


def cut(
    model_type: str, adapter: AdapterConfig | None = None, **changes: Any
) -> tuple[Bundle, Shard]:
    """What layers 0 to 2 send on, and the shard behind them."""
    config = tiny_config(model_type)
    config.update(changes)
    plan = None if adapter is None else plan_adapter(config, adapter)
    front, back = (
        build_shard(config, None, rng, seed=1)
        for rng in (ShardRange(0, 3, True, False), ShardRange(3, 6, False, True))
    )
    for shard in (front, back):
        attach_adapter(shard, plan, 0)
    return crossing(front.forward({"input_ids": IDS}, ())), back


def problem(shard: Shard, sides: Bundle, *, train: bool = True, **training: Any) -> str | None:
    settings = TrainingConfig(**training)
    return SideTensorChecks(shard, settings).problem(sides, ROWS, TOKENS, train=train)


@pytest.mark.parametrize(
    ("target_modules", "trained"),
    [
        (None, {"per_layer_input", "shared_kv_states"}),
        (("q_proj", "o_proj"), {"shared_kv_states"}),
        (("per_layer_model_projection",), {"per_layer_input", "shared_kv_states"}),
        (r".*layers\.[45]\..*o_proj", set()),
    ],
    ids=["all weights", "layers", "before the layers", "behind"],
)
def test_side_tensors_of_a_part_before_are_expected(target_modules, trained):
    adapter = target_modules and AdapterConfig(r=2, target_modules=target_modules)
    (_, *sides), back = cut("gemma3n_text", adapter)
    assert problem(back, tuple(sides)) is None
    assert problem(back, tuple(side.detach() for side in sides), train=False) is None
    named = zip(back.entering, sides, strict=True)
    wanting = {side.name.partition(".")[0] for side, tensor in named if tensor.requires_grad}
    assert wanting == trained


def test_numbers_that_want_no_gradient_are_expected_too():
    (_, indices), back = cut("hy_v4")
    assert problem(back, (indices,)) is None
    said = problem(back, (indices.long(),))
    assert said.startswith("prev_topk_indices is 3 x 5 x 4 of int64, expected 3 x 5 x 4 of int32")


def test_routers_logits_are_expected():
    (_, *logits), back = cut("mixtral", output_router_logits=True)
    assert [tuple(tensor.shape) for tensor in logits] == [(ROWS * TOKENS, 4)] * 3
    assert problem(back, tuple(logits)) is None
    said = problem(back, (logits[0][:2].detach().requires_grad_(), *logits[1:]))
    assert said.startswith("mlp.gate.0 is 2 x 4 of float32 that wants a gradient, expected 15 x 4")


WRONG: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda side: side[:1].detach().requires_grad_(), "1 x 5 x 16 of float32"),
    (lambda side: side[:, :4].detach().requires_grad_(), "3 x 4 x 16 of float32"),
    (lambda side: side[..., :1].detach().requires_grad_(), "3 x 5 x 1 of float32"),
    (lambda side: side.sum().detach().requires_grad_(), "a single number of float32"),
    (lambda side: side.double().detach().requires_grad_(), "3 x 5 x 16 of float64"),
]


@pytest.mark.parametrize(("change", "got"), WRONG)
def test_another_shape_or_type_is_a_problem_with_both(change, got):
    (_, first, *others), back = cut("gemma3n_text")
    said = problem(back, (change(first), *others))
    wanted = "3 x 5 x 16 of float32 that wants a gradient"
    assert said == f"per_layer_input is {got} that wants a gradient, expected {wanted}"


def test_an_unwanted_or_missing_gradient_is_a_problem():
    (_, first, *others), back = cut("gemma3n_text")
    wanted = "3 x 5 x 16 of float32 that wants a gradient"
    said = problem(back, (first.detach(), *others))
    assert said == f"per_layer_input is 3 x 5 x 16 of float32, expected {wanted}"
    said = problem(back, (first, *others), train=False)
    assert said == f"per_layer_input is {wanted}, expected 3 x 5 x 16 of float32"


def test_autocast_may_leave_either_type_but_no_third():
    (_, first, *others), back = cut("gemma3n_text")
    for dtype, fits in ((torch.bfloat16, True), (torch.float32, True), (torch.float64, False)):
        sent = first.detach().to(dtype).requires_grad_()
        assert (problem(back, (sent, *others), bf16=True) is None) == fits


def test_axes_and_kind_are_known_where_parts_need_numbers(monkeypatch):
    def fails(*args: Any) -> None:
        raise RuntimeError("needs numbers")

    (_, first, *others), back = cut("gemma3n_text")
    monkeypatch.setattr(side_tensor_checks, "bundle_at", fails)
    assert problem(back, (first, *others)) is None
    said = problem(back, (first[0].detach().requires_grad_(), *others))
    assert said.endswith("expected 2 x 12 x 16 of float32 that wants a gradient in a tiny copy")
    assert problem(back, (first.detach().long(), *others)) is not None


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [("inkling2_text", 0), pytest.param("hy_v4", 3, marks=pytest.mark.long)],
)
def test_a_few_runs_determine_the_shapes_for_every_length(model_type, extra, monkeypatch):
    _, back = cut(model_type)
    asked = []
    real = side_tensor_checks.bundle_at
    monkeypatch.setattr(side_tensor_checks, "bundle_at", lambda *a: (asked.append(a), real(*a))[1])
    expected = SideTensorChecks(back, TrainingConfig())
    setting = expected._setting
    first = [(2, 5 + n) for n in range(side_tensor_checks._COUNTED)]
    for rows, tokens in (*first, (2, 3), (4, 600), (5, 9), (2, 3)):
        forms = expected._expected(rows, tokens)
        assert forms is not None
        assert tuple(forms) == real(replace(setting, rows=rows, tokens=tokens), 3)[1:]
    # HY V4 takes the best 4 of all tokens, or as many as there are: each length is asked for once.
    assert len(asked) == len(first) + len(side_tensor_checks._PROBES) + extra


def test_an_axis_is_found_as_a_function_of_rows_and_tokens():
    def axis(rule: Any) -> Any:
        return side_tensor_checks._axis([rule(*probe) for probe in side_tensor_checks._PROBES])

    for rule in (lambda r, t: 7, lambda r, t: r * t, lambda r, t: t + 32, lambda r, t: 2 * r):
        assert axis(rule)(4, 100) == rule(4, 100)
    for rule in (lambda r, t: min(t, 9000), lambda r, t: t // 4):
        assert axis(rule) is None


def test_an_adapter_trains_tensors_that_depend_on_its_modules():
    plan = plan_adapter(tiny_config("llama"), AdapterConfig(r=2, target_modules=("q_proj",)))
    assert plan.trains({"model.layers.3.self_attn.q_proj.weight"})
    assert not plan.trains({"model.layers.3.self_attn.k_proj.weight", "lm_head.weight"})
    saved = AdapterConfig(r=2, target_modules=("q_proj",), modules_to_save=("mlp",))
    plan = plan_adapter(tiny_config("llama"), saved)
    assert plan.trains({"model.layers.3.mlp.up_proj.weight"})
    assert not replace(plan, trainable={}).trains({"model.layers.3.mlp.up_proj.weight"})
