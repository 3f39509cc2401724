"""Predictions count what really travels."""

from __future__ import annotations

import torch

from hetero_framework.core.codecs import Int8
from hetero_framework.profiling import what_if


def test_int8_is_as_large_as_the_codec_makes_it() -> None:
    nbytes = Int8().nbytes((64, 64), torch.float32)
    assert nbytes == 64 * 64 * what_if._INT8_BYTES
