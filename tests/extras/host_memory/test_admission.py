"""Architectures whose layers may be streamed: a tiny copy has the same bits."""

from __future__ import annotations

import pytest

from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.host_memory import admission
from hetero_framework.extras.host_memory.streamed_layers import StreamedLayers
from hetero_framework.models.cut.tiny import tiny_config


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3n_text", "gpt_oss", "data2vec-text"])
def test_architectures_with_side_tensors_experts_or_other_norms_pass(name: str) -> None:
    assert admission.try_streaming(tiny_config(name)) == ""


def test_layers_that_are_overwritten_too_early_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    use = StreamedLayers._use

    def early(self: StreamedLayers, position: int) -> None:
        use(self, position)
        if position == 0:
            self._fetch(1)

    monkeypatch.setattr(StreamedLayers, "_use", early)
    monkeypatch.setattr(admission, "recall", lambda *_: None)
    with pytest.raises(ArchitectureError, match="cannot stay in host memory"):
        admission.admit_streaming(tiny_config("llama"))
