from __future__ import annotations

import math
import random

import pytest
import torch

from hetero_framework.engine.loss_scale import LossScale


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_scale_follows_torchs_grad_scaler(seed):
    draw = random.Random(seed)
    scaler = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scale = LossScale.for_training(fp16=True)
    scaler.scale(torch.ones(1))
    assert scale.value == scaler.get_scale()
    seen = set()
    # Runs of good steps around the growth interval, with one to three bad ones between them.
    for good, bad in [(draw.choice([5, 1999, 2000, 2003]), draw.randint(1, 3)) for _ in range(4)]:
        for finite in [True] * good + [False] * bad:
            parameter.grad = torch.tensor([1.0 if finite else float("inf")])
            scaler.step(optimizer)
            scaler.update()
            scale = scale.after(finite)
            assert scale.value == scaler.get_scale()
            seen.add(scale.value)
    assert len(seen) > 2


def test_the_loss_scale_stays_1_without_fp16():
    scale = LossScale.for_training(fp16=False)
    for finite in (True, False, True):
        scale = scale.after(finite)
    assert scale == LossScale(1.0, 0)
    assert not scale.active


def test_the_loss_scale_does_not_switch_itself_off():
    scale = LossScale(4.0)
    for _ in range(5):
        scale = scale.after(finite=False)
        assert scale.active
    assert scale.value == 2.0


@pytest.mark.parametrize(
    ("value", "losses", "explained"),
    [
        (1024.0, [1.0, 2.0], True),
        (1024.0, [1.0, math.nan], False),  # the forward itself is broken
        (2.0, [1.0], False),  # nothing is left to halve
    ],
)
def test_overflows_that_scales_explain(value, losses, explained):
    assert LossScale(value).explains(losses) == explained
