"""Masks of torch's attention that are made without a look at the device's numbers."""

import pytest
import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from hetero_framework.models.cut.known_masks import all_seen, knowing, register_known_masks

TOKENS = 6
MASKS = {"full": [TOKENS, TOKENS], "padded": [TOKENS, 3], "all padded": [4, 3]}


@pytest.mark.parametrize("lengths", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_a_known_mask_gives_what_the_device_would_say(lengths, window, kind):
    seen_BS = (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).to(kind)
    there_BS = seen_BS.to(kind).clone()
    there_BS._hetero_host = seen_BS  # type: ignore[attr-defined]
    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    settings = {"mask_function": function, "local_size": window, "use_vmap": False}
    register_known_masks()
    with knowing(there_BS):
        found = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            2, TOKENS, TOKENS, attention_mask=there_BS.bool(), **settings
        )
    right = sdpa_mask(2, TOKENS, TOKENS, attention_mask=there_BS.bool(), **settings)
    assert (found is None) == (right is None)
    if found is not None:
        assert torch.equal(found, right)


def test_the_devices_numbers_are_not_read():
    """Its own are void here, and the mask is that of the CPU tensor."""
    register_known_masks()
    make = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    void_BS = all_seen(torch.zeros(2, TOKENS, dtype=torch.int64))
    with knowing(void_BS):
        assert make(2, TOKENS, TOKENS, attention_mask=torch.zeros(2, TOKENS).bool()) is None
    # Outside, and for a mask of another shape, transformers looks for itself.
    assert make(2, TOKENS, TOKENS, attention_mask=torch.zeros(2, TOKENS).bool()) is not None
    with knowing(void_BS):
        assert make(1, TOKENS, TOKENS, attention_mask=torch.zeros(1, TOKENS).bool()) is not None
