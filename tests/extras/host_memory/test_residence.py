"""Architectures whose layers may be streamed: a tiny copy has the same bits."""

from __future__ import annotations

import pytest
import torch

from hetero_framework.errors import ArchitectureError, DeviceError
from hetero_framework.extras.host_memory import residence
from hetero_framework.extras.host_memory.streamed_layers import StreamedLayers
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.verify import equivalence


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3n_text", "gpt_oss", "data2vec-text"])
def test_architectures_with_side_tensors_experts_or_other_norms_pass(name):
    assert residence.try_streaming(tiny_config(name)) == ""


@pytest.mark.parametrize("recomputed", [0, 2])
def test_layers_that_are_overwritten_too_early_are_seen(recomputed, monkeypatch):
    """Also where they are only in the last run, the second one whose layers are computed again."""
    use, recompute, runs = StreamedLayers._use, Shard.recompute_blocks, list[Shard]()

    def noting(self: Shard) -> None:
        runs.append(self)
        recompute(self)

    def early(self: StreamedLayers, position: int) -> None:
        use(self, position)
        if position == 0 and len(runs) >= recomputed:
            self._fetch(1)

    monkeypatch.setattr(Shard, "recompute_blocks", noting)
    monkeypatch.setattr(StreamedLayers, "_use", early)
    monkeypatch.setattr(equivalence, "recall", lambda *_: None)
    with pytest.raises(ArchitectureError, match="cannot stay in host memory"):
        residence.admit_streaming(tiny_config("llama"))


def test_trained_layers_visit_only_where_a_parameter_may_be_read_in_host_memory(monkeypatch):
    residence.check_trained_may_visit(torch.device("cpu"))

    class Bound(torch.nn.Parameter):
        """As on an accelerator that torch knows only by its extension."""

        def __setattr__(self, name, value):
            raise RuntimeError("incompatible tensor type")

    monkeypatch.setattr(residence, "Parameter", Bound)
    with pytest.raises(DeviceError, match="cannot stay in host memory beside cpu: RuntimeError"):
        residence.check_trained_may_visit(torch.device("cpu"))
