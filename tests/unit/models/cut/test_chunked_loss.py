"""The loss in chunks: the same numbers, the same bits under every cut, and less memory."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hetero_framework.models.cut.chunked_loss import chunk_tokens, chunked_loss, spans
from hetero_framework.models.cut.shard import Shard, build_shard
from hetero_framework.models.cut.side import Bundle, crossing
from hetero_framework.models.cut.tiny import probe_inputs, tiny_config
from hetero_framework.models.library import quiet_library
from hetero_framework.models.rng import derive_seed
from hetero_framework.models.sizing.footprint import PeakMemory
from hetero_framework.models.verify.equivalence import why_not_chunked
from tests.cases import seldom, spread
from tests.unit.adapter_helpers import chain_loss, ranges

ITEMS = torch.tensor(21)
CUTS = [(0, 6), (0, 3, 6), (0, 0, 2, 6), (0, 1, 5, 6, 6)]
Numbers = tuple[torch.Tensor, dict[str, torch.Tensor]]


@functools.lru_cache
def config_of(model_type: str) -> Any:
    with quiet_library():
        return tiny_config(model_type)


def build(model_type: str, *bounds: int, **kwargs: Any) -> list[Shard]:
    return [build_shard(config_of(model_type), None, r, **kwargs) for r in ranges(*bounds)]


def run(shards: list[Shard], inputs: dict[str, torch.Tensor], limit: int | None) -> Numbers:
    """Loss and gradients of a chain of shards whose last one works in pieces (None: whole)."""

    def last(received: Bundle) -> torch.Tensor:
        if limit is None:
            return shards[-1].loss(inputs, received, ITEMS)
        return in_pieces(shards[-1], inputs, received, limit)

    loss = chain_loss(shards, inputs, last)
    gradients = {}
    for shard in shards:
        named = shard.model.named_parameters()
        gradients.update({n: p.grad for n, p in named if p.grad is not None})
        shard.model.zero_grad()
    return loss, gradients


def in_pieces(
    shard: Shard, inputs: dict[str, torch.Tensor], received: Bundle, limit: int
) -> torch.Tensor:
    pieces = spans(inputs["labels"].shape, limit)
    assert pieces
    how = {"running": nullcontext, "backward": torch.Tensor.backward}
    return chunked_loss(shard, inputs, received, ITEMS, pieces, **how)


# ---- where the pieces lie


@pytest.mark.parametrize("shape", [(1, 2), (1, 97), (3, 12), (7, 5), (16, 64)])
@pytest.mark.parametrize("limit", [2, 3, 8, 50, 100])
def test_every_label_is_predicted_in_exactly_one_piece_of_bounded_size(shape, limit):
    pieces = spans(shape, limit)
    assert bool(pieces) == (shape[0] * shape[1] > limit)
    predicted = torch.zeros(shape, dtype=torch.int64)
    for rows, tokens in pieces:
        assert (rows.stop - rows.start) * (tokens.stop - tokens.start) <= limit
        predicted[rows, slice(tokens.start + 1, tokens.stop)] += 1
    assert not pieces or (predicted[:, 1:] == 1).all()


def test_without_a_limit_the_loss_is_one_chunk():
    assert spans((64, 4096), None) == []
    assert spans((64, 1), 8) == []


def test_auto_depends_on_the_vocabulary_alone():
    config = config_of("llama")
    assert chunk_tokens("auto", config) == (1 << 26) // 160
    assert chunk_tokens(7, config) == 7
    assert chunk_tokens(None, config) is None


# ---- the same numbers


@pytest.mark.parametrize(
    ("model_type", "limit"),
    spread(["llama", "gemma2", "gpt2", "cohere", "granite", "mixtral", "opt"], [2, 5, 13]),
)
def test_pieces_have_the_loss_and_gradients_of_the_whole(model_type, limit):
    (shard,) = build(model_type, 0, 6)
    shard.train(False)
    inputs = probe_inputs(config_of(model_type))
    loss, gradients = run([shard], inputs, None)
    other_loss, other = run([shard], inputs, limit)
    torch.testing.assert_close(other_loss, loss)
    assert other.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", seldom(["llama", "gpt2", "gemma2"], "llama"))
def test_pieces_are_the_same_to_the_bit_under_every_cut(model_type):
    """In training mode, with dropout where the model has it, and layers computed again."""
    inputs = probe_inputs(config_of(model_type))
    results = []
    for bounds, again in itertools.product(CUTS, (False, True)):
        shards = build(model_type, *bounds)
        for shard in shards:
            shard.train(True)
            shard.on_enter = lambda place: torch.manual_seed(derive_seed("test", place)) and None
            if again:
                shard.recompute_blocks()
        results.append(run(shards, inputs, 5))
    loss, gradients = results[0]
    for other_loss, other in results[1:]:
        assert torch.equal(other_loss, loss)
        assert all(torch.equal(other[name], gradient) for name, gradient in gradients.items())


def test_each_loss_chunk_draws_its_own_random_numbers():
    seen: list[str | int] = []
    first, last = build("llama", 0, 4, 6)
    last.on_enter = seen.append
    inputs = probe_inputs(config_of("llama"))
    in_pieces(last, inputs, crossing(first.forward(inputs, ())), 13)
    assert seen == ["embedding", 4, 5, "head", "head 1"]


def test_after_a_chunked_loss_the_shard_works_as_before():
    (shard,) = build("gpt2", 0, 6)
    shard.train(False)
    inputs = probe_inputs(config_of("gpt2"))
    before = run([shard], inputs, None)[0]
    run([shard], inputs, 5)
    assert torch.equal(run([shard], inputs, None)[0], before)


def test_gradients_in_bfloat16_are_rounded_once():
    (shard,) = build("llama", 0, 6, dtype=torch.bfloat16)
    inputs = probe_inputs(config_of("llama"))
    whole = run([shard], inputs, None)[1]["lm_head.weight"].float()
    pieces = run([shard], inputs, 2)[1]["lm_head.weight"]
    assert pieces.dtype == torch.bfloat16
    # Half a unit in the last place of 8 bits for either side, of the largest entry of a row.
    assert (pieces.float() - whole).abs().max() <= 2**-7 * whole.abs().max()


def test_gradients_add_to_those_of_earlier_micro_batches():
    for dtype in (torch.float32, torch.bfloat16):
        (shard,) = build("llama", 0, 6, dtype=dtype)
        shard.train(False)
        inputs = probe_inputs(config_of("llama"))
        once = run([shard], inputs, 5)[1]
        in_pieces(shard, inputs, (), 5)
        in_pieces(shard, inputs, (), 5)
        for name, gradient in once.items():
            torch.testing.assert_close(shard.model.get_parameter(name).grad, 2 * gradient)


def test_a_row_longer_than_the_table_works_with_restarting_positions():
    (shard,) = build("gpt2", 0, 6)
    shard.train(False)
    ids = torch.randint(3, 160, (1, 300), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100).repeat(3)[None]
    inputs = {"input_ids": ids, "position_ids": positions, "labels": ids}
    loss, _ = run([shard], inputs, None)
    torch.testing.assert_close(run([shard], inputs, 200)[0], loss)


# ---- which models can


@pytest.mark.parametrize("model_type", ["llama", "opt", "qwen3_moe"])
def test_heads_that_work_token_by_token_are_admitted(model_type):
    assert why_not_chunked(config_of(model_type)) is None


@pytest.mark.parametrize(
    ("model_type", "reason"), [("cpmant", "does not run on a part"), ("xlm", "loss would differ")]
)
def test_models_that_cannot_be_chunked_come_with_a_reason(model_type, reason):
    assert reason in str(why_not_chunked(config_of(model_type)))


def test_the_loss_of_routers_is_one_of_the_whole_micro_batch():
    config = config_of("mixtral")
    config.output_router_logits = True
    assert why_not_chunked(config) == "the routers' loss is one of the whole micro-batch"


# ---- less memory


def head_peak(tokens: int, limit: int | None) -> int:
    """Bytes at once of a head alone over [2, tokens], beyond its hidden states."""
    shard = head_shard()
    hidden = torch.randn(2, tokens, 64, requires_grad=True)
    labels = torch.randint(3, 4096, (2, tokens))
    inputs = {"labels": labels, "attention_mask": torch.ones_like(labels)}
    with PeakMemory() as peak:
        if limit is None:
            shard.loss(inputs, (hidden,), ITEMS).backward()
        else:
            in_pieces(shard, inputs, (hidden,), limit)
    shard.model.zero_grad()
    return peak.most


@functools.lru_cache
def head_shard() -> Shard:
    config = tiny_config("llama")
    config.vocab_size = 4096
    return build_shard(config, None, ranges(0, 6, 6)[1])


def test_memory_of_the_logits_does_not_depend_on_the_micro_batch():
    logits = 4 * 4096  # of one token, in float32
    whole = [head_peak(tokens, None) for tokens in (64, 256)]
    assert whole[1] - whole[0] > 3 * logits * 2 * (256 - 64)
    pieces = [head_peak(tokens, 64) for tokens in (64, 256, 1024)]
    # What grows is the gradient of the hidden states and the labels, 64 numbers a token.
    assert pieces[2] - pieces[0] < 0.05 * logits * 2 * (1024 - 64)
    assert pieces[1] < whole[1] / 5
