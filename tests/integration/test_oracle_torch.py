"""A plain torch loop over the whole stock model is equal to three stages, to the last bit."""

from __future__ import annotations

import pytest

from tests.integration.oracles import save_adapter, torch_run
from tests.integration.test_parity import assert_same, weights

pytestmark = pytest.mark.xdist_group("pool2")


@pytest.mark.parametrize(
    "training", [{}, {"weight_decay": 0.1}, {"fp16": True}], ids=["plain", "decay", "fp16"]
)
def test_full_training_equals_a_torch_loop(training, losses, llama, texts, tmp_path) -> None:
    ours = losses([2, 4], training=training)
    theirs, trained = torch_run(llama, texts, **training)
    assert ours == theirs
    assert_same(weights(tmp_path / "run"), trained)


def test_lora_equals_a_torch_loop(losses, llama, texts, tmp_path) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter")
    ours = losses([2, 4], adapter={"init_from": str(adapter)})
    theirs, trained = torch_run(llama, texts, adapter)
    assert ours == theirs
    assert_same(weights(tmp_path / "run"), trained)
