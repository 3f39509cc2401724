"""Operations and bytes of a model's parts for one micro-batch, computed from shapes alone.

A product with a matrix of n numbers takes 2 n operations per token forward. Backward it takes 2 n
for the gradient of its input and, if the matrix is trained, 2 n for the matrix's own. Attention
takes 4 S D per token forward, for S tokens and heads of D numbers in all, and twice that backward.
Only the experts that a token visits count. Smaller work (norms, activations) is left out.

Bytes are the weights, and what a layer stores for backward, written and read once. Quantised
weights are unpacked before each product, in a pass whose time adds to the product's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hetero_framework.config import Config
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.cut.family import family_of
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.sizing.footprint import Setting, bundle_bytes
from hetero_framework.models.sizing.memory import (
    Shapes,
    StageMemory,
    memory_of_parts,
    shapes_of,
)

_EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k", "top_k"),
)


@dataclass(frozen=True)
class PartWork:
    """Floating-point operations of one micro-batch, and bytes between device and memory.
    `unpacked` numbers of quantised weights are unpacked for forward, and again for backward. Each
    of `tensors` tensors of weights has kernels of its own."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    unpacked: float
    tensors: int


@dataclass(frozen=True)
class ModelWork:
    """The work of a model's parts. At most `hidden_numbers` of type `dtype` cross a boundary. The
    memory of embedding, layers and head is `memory` without gradient checkpointing and
    `recomputing` with it. `half`: the arithmetic has 16 bits. `width` is the hidden size."""

    embedding: PartWork
    layers: list[PartWork]
    head: PartWork
    memory: list[StageMemory]
    recomputing: list[StageMemory]
    hidden_numbers: int
    dtype: str
    half: bool
    width: int


def model_work(config: Config, model: PretrainedConfig) -> ModelWork:
    """The work of `model`, which is of `config` (from `Config.held_by` for one process). Loads no
    weights. Raises as `plan_adapter` and `introspect` do."""
    assert config.model is not None
    plan = adapter_plan_of(config, model)
    shapes = shapes_of(config, model, plan, config.model.quantization)
    count = shapes.skeleton.structure.num_layers
    tokens = config.row_tokens
    rows = config.training.train_rows
    memory, recomputing = (
        memory_of_parts(
            config.with_changes(training={"gradient_checkpointing": again}), model, count, plan
        )
        for again in (False, True)
    )
    bounds = [(0, 0), *((k, k + 1) for k in range(count)), (count, count)]
    ranges = [ShardRange(a, b, k == 0, k == count + 1) for k, (a, b) in enumerate(bounds)]
    parts = []
    known: dict[object, PartWork] = {}  # most layers are alike
    differentiates = False
    for rng, held in zip(ranges, memory, strict=True):
        key = (shapes.form(rng), differentiates)
        if key not in known:
            part = _PartShapes(shapes, rng, held)
            differentiates |= part.trains
            known[key] = part.work(rows, tokens, differentiates)
        parts.append(known[key])
    training = config.training
    return ModelWork(
        parts[0],
        parts[1:-1],
        parts[-1],
        memory,
        recomputing,
        _largest_bundle(shapes.setting(config, tokens), shapes) // shapes.number_bytes,
        shapes.dtype,
        half=training.bf16 or training.fp16 or shapes.number_bytes == 2,
        width=int(shapes.text.hidden_size),
    )


def _largest_bundle(setting: Setting, shapes: Shapes) -> int:
    """Bytes that cross the boundary with the most bytes."""
    structure = shapes.skeleton.structure
    boundaries = {0, *(side.maker + 1 for side in structure.sides)}
    return max(bundle_bytes(setting, k) for k in boundaries)


class _PartShapes:
    """The shapes of one part: the embedding, a layer or the head."""

    def __init__(self, shapes: Shapes, rng: ShardRange, memory: StageMemory) -> None:
        self._shapes, self._rng, self._memory = shapes, rng, memory
        experts = experts_per_token(shapes.text)
        held = {n: s for n, s in shapes.of_matrices.items() if shapes.skeleton.holds(n, rng)}
        # Rows of a table are looked up, not multiplied.
        multiplied = held if rng.end > rng.start or rng.is_last else {}
        self._numbers = {
            name: shape[-1] * shape[-2] * (experts if len(shape) > 2 else 1)
            for name, shape in multiplied.items()
        }
        trained = {n: v for n, v in shapes.trainable.items() if shapes.holds(n, rng)}
        self._added = sum(n for name, (n, _) in trained.items() if name not in shapes.numbers)
        every = shapes.trains_everything  # a tied head is trained, too
        self._trained = sum(n for name, n in self._numbers.items() if every or name in trained)
        self.trains = bool(trained)
        added = [name for name in trained if name not in shapes.numbers]
        self._tensors = sum(shapes.skeleton.holds(n, rng) for n in shapes.numbers) + len(added)

    def work(self, rows: int, tokens: int, differentiates: bool) -> PartWork:
        """The work of the part. `differentiates`: something in it or below it is trained."""
        batch_tokens, memory = rows * tokens, self._memory
        is_layer = self._rng.end > self._rng.start
        products = 2.0 * batch_tokens * sum(self._numbers.values())
        trained = 2.0 * batch_tokens * self._trained
        if (family := family_of(model := self._shapes.text)) is not None:
            here = range(self._rng.start, self._rng.end)
            products = trained = float(sum(family.flops(model, k, rows) for k in here))
        added = 2.0 * batch_tokens * self._added
        attention = 4.0 * batch_tokens * tokens * _attention_numbers(self._shapes.text) * is_layer
        kept = memory.per_micro_batch if is_layer else memory.logits
        unpacked = float(self._unpacked())
        weights = memory.weights + 2.0 * unpacked  # products read 16 bits for each
        forward_bytes = weights + 2.0 * kept
        if not differentiates:
            return PartWork(
                products + added + attention, 0.0, forward_bytes, 0.0, unpacked, self._tensors
            )
        return PartWork(
            products + added + attention,
            products + trained + 2 * (added + attention),
            forward_bytes,
            weights + 2.0 * kept + 2.0 * memory.gradients,
            unpacked,
            self._tensors,
        )

    def _unpacked(self) -> int:
        """Numbers of the weights that take less than 16 bits each."""
        numbers, weights = self._shapes.numbers, self._shapes.weights
        return sum(numbers[n] for n in self._numbers if weights[n] < numbers[n] * 2)


def experts_per_token(text: PretrainedConfig) -> int:
    """How many experts a token visits; 1 for a model without experts."""
    values = (getattr(text, name, None) for name in _EXPERTS_PER_TOKEN)
    return next((value for value in values if isinstance(value, int) and value > 0), 1)


def _attention_numbers(text: Any) -> int:
    """The number of heads times their size; 0 for a model without heads."""
    heads = getattr(text, "num_attention_heads", None) or 0
    each = getattr(text, "head_dim", None) or (int(text.hidden_size) // heads if heads else 0)
    return int(heads * each)
