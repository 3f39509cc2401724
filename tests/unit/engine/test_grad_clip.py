from __future__ import annotations

import itertools

import pytest
import torch

from hetero_framework.engine.grad_clip import ModelOrder, clip_factor
from hetero_framework.engine.stage_api import GradientReport
from hetero_framework.errors import ProtocolError

# (stage's parameters with their ranks): two stages, the second one reports out of model order.
NAMES = [
    [("embed", (0,)), ("layers.0.w", (1, 0)), ("layers.0.b", (1, 1))],
    [("head", (9,)), ("layers.2.w", (3, 0)), ("layers.1.w", (2, 0))],
]


def gradients(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    names = [name for stage in NAMES for name, _ in stage]
    return {name: scale * torch.randn(37, 11, generator=draw) for name in names}


def report(names: list[str], grads: dict[str, torch.Tensor]) -> GradientReport:
    norms = [torch.linalg.vector_norm(grads[name], dtype=torch.float32) for name in names]
    return GradientReport(torch.stack(norms) if norms else torch.zeros(0))


def reports(grads: dict[str, torch.Tensor]) -> list[GradientReport]:
    return [report([name for name, _ in stage], grads) for stage in NAMES]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e6])
def test_norm_and_clipping_are_torchs_to_the_bit(seed, max_norm):
    grads = gradients(seed)
    names = [name for name, _ in sorted(itertools.chain(*NAMES), key=lambda entry: entry[1])]
    parameters = [torch.nn.Parameter(torch.zeros(37, 11)) for _ in names]
    for parameter, name in zip(parameters, names, strict=True):
        parameter.grad = grads[name].clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    norm = ModelOrder(NAMES).global_norm(reports(grads))
    assert torch.equal(norm, expected)
    factor = clip_factor(norm, max_norm)
    for parameter, name in zip(parameters, names, strict=True):
        ours = grads[name].mul_(factor) if factor != 1.0 else grads[name]
        assert torch.equal(ours, parameter.grad)


def test_global_norm_does_not_depend_on_the_cut():
    flat = sorted((p for stage in NAMES for p in stage), key=lambda p: p[1])
    for seed in range(20):
        grads = gradients(seed)
        norms = set()
        for bounds in ([0, 6], [0, 1, 6], [0, 2, 3, 5, 6], [0, 0, 3, 6, 6]):
            cut = [flat[a:b] for a, b in itertools.pairwise(bounds)]
            parts = [report([name for name, _ in stage], grads) for stage in cut]
            norms.add(float(ModelOrder(cut).global_norm(parts)))
        norms.add(float(ModelOrder(NAMES).global_norm(reports(grads))))
        assert len(norms) == 1


def test_model_order_keeps_a_stages_order_among_equal_ranks():
    cut = [[("a", (1,)), ("b", (1,))], [("c", (0,)), ("d", (1,))]]
    assert ModelOrder(cut)._order.tolist() == [2, 0, 1, 3]


def test_model_order_of_a_frozen_model_has_norm_zero():
    empty = GradientReport(torch.zeros(0))
    assert float(ModelOrder([[], []]).global_norm([empty, empty])) == 0.0


@pytest.mark.parametrize(
    ("norm", "most", "factor"), [(1e9, 0.0, 1.0), (0.5, 1.0, 1.0), (2.0, 1.0, pytest.approx(0.5))]
)
def test_clip_factor_never_enlarges_and_zero_means_never(norm, most, factor):
    assert clip_factor(torch.tensor(norm), most) == factor


@pytest.mark.parametrize("norms", [torch.zeros(2), torch.zeros(0), torch.zeros(3).half()])
def test_stage_that_reports_other_parameters_than_it_has_is_named(norms):
    """A longer vector would shift the norms of all stages behind it."""
    found = reports(gradients(0))
    found[1] = GradientReport(norms)
    text = r"stage 1 reports norms of shape .*it has 3 parameters"
    with pytest.raises(ProtocolError, match=text):
        ModelOrder(NAMES).global_norm(found)
