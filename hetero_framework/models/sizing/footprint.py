"""Bytes that a part of a model stores for a micro-batch, and the part's peak while it runs.

The part runs forward and backward on tensors that have shapes and no data, so nothing is read or
computed, and the size of the model does not matter. The part is the shard that a stage would load,
with its adapter, type and loss. The micro-batch is padded, since some attention needs a mask only
then. A part that cannot run without numbers (its experts' input depends on them) has no footprint.

Shapes: B rows of a micro-batch, S tokens, D hidden size.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hetero_framework.data.batches import PICTURES, MicroBatch
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.family import family_of
from hetero_framework.models.cut.introspect import introspect, layer_kinds
from hetero_framework.models.cut.objective import Objective
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Shard, build_shard
from hetero_framework.models.cut.side import (
    Bundle,
    Form,
    Side,
    as_leaves,
    crossing,
    differentiate,
    returning,
)
from hetero_framework.models.cut.tiny import PROBE_ROWS, PROBE_TOKENS
from hetero_framework.models.library import LIBRARY_ERRORS

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_MOST_CHUNKS = 4
_UNMASKED = "unmasked"  # transformers makes no mask for an attention that it does not know
_MOST_NUMBERS = 1 << 24
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one part and one micro-batch.

    `kept` bytes are held from the part's forward to its backward: its output and what autograd
    stores, without its input. Of these, all layers of a stage share `shared` bytes (the mask).
    `forward` and `backward` are the most further bytes while the part runs, with gradients that are
    not yet added to those of earlier micro-batches. An undifferentiated part keeps nothing.
    """

    kept: int
    shared: int
    forward: int
    backward: int

    @property
    def passing(self) -> int:
        """The most bytes in addition to `kept`."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class Setting:
    """Settings of footprints besides the part. `autocast` is the type of matrix products where it
    is not the weights' type. A micro-batch has `rows` rows of `tokens` tokens. `pictures` is one
    with pictures, for the first part, which reads its whole numbers alone."""

    model: PretrainedConfig
    plan: AdapterPlan | None
    objective: Objective
    dtype: torch.dtype
    autocast: torch.dtype | None
    rows: int
    tokens: int
    pictures: MicroBatch | None = None

    @property
    def key(self) -> tuple[object, ...]:
        seen = (self.pictures or {}).items()
        return (
            *((n, t.shape, b"" if t.is_floating_point() else t.numpy().tobytes()) for n, t in seen),
            *(self.model.to_json_string(), self.model._attn_implementation),
            self.plan and self.plan.key,
            *(repr(vars(self.objective)), self.dtype, self.autocast, self.rows, self.tokens),
        )


_counted: dict[tuple[object, ...], Footprint | None] = {}

_forms: dict[tuple[object, ...], tuple[Form, ...]] = {}
_parts: dict[tuple[object, ...], tuple[Shard, FakeTensorMode]] = {}


def bundle_at(setting: Setting, block: int) -> tuple[Form, ...]:
    """The bundle at the boundary in front of a block: the hidden state, then side tensors. Raises
    one of LIBRARY_ERRORS where a part that makes a side tensor cannot run without numbers."""
    if (family := family_of(setting.model)) is not None:
        return family.entering(setting.model, block, setting.rows)
    structure = introspect(setting.model)
    crossing_sides = structure.sides_at(block)
    made: dict[Side, Form] = {}
    for maker in {side.maker for side in crossing_sides}:
        sides = [side for side in structure.sides if side.maker == maker]
        made |= zip(sides, _made_by(setting, maker)[1:], strict=True)
    return (_made_by(setting, -1)[0], *(made[side] for side in crossing_sides))


def bundle_forms(setting: Setting, block: int) -> tuple[Form, ...]:
    """`bundle_at`, or an estimate where that cannot be counted: the tiny copy's tensors, scaled."""
    try:
        return bundle_at(setting, block)
    except LIBRARY_ERRORS as error:
        _log.debug("no shapes of what enters layer %d: %s", block, error)
    structure = introspect(setting.model)
    scale = int(setting.model.get_text_config().hidden_size) / structure.tiny_width
    scale *= setting.rows * setting.tokens / (PROBE_ROWS * PROBE_TOKENS)
    tiny = [(structure.hidden_shape, setting.dtype)]
    tiny += [(side.shape, side.dtype) for side in structure.sides_at(block)]
    return tuple((((math.ceil(math.prod(shape) * scale)),), dtype, True) for shape, dtype in tiny)


def bundle_bytes(setting: Setting, block: int) -> int:
    """Bytes of all that crosses the boundary in front of a block."""
    forms = bundle_forms(setting, block)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in forms)


def _made_by(setting: Setting, maker: int) -> tuple[Form, ...]:
    """The hidden state and the side tensors that a part makes; see `Side.maker`."""
    structure = introspect(setting.model)
    numbers = Counter(side.maker for side in structure.sides)
    if maker >= 0:
        alike = layer_kinds(setting.model)[maker]
        maker = alike if numbers[alike] == numbers[maker] else maker
    key = (*setting.key, maker)
    if key not in _forms:
        incoming = bundle_at(setting, maker) if maker >= 0 else ()
        shard, mode = _pretended(setting, maker)
        # A caller that records autograd's saved tensors shall not see this run.
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        half = torch.autocast("cpu", setting.autocast) if setting.autocast else nullcontext()
        with _quiet(), mode, torch.random.fork_rng(devices=[]), unseen, half:
            left = shard.forward(_inputs(setting), _fakes(incoming))
        makers = [-1, *(side.maker for side in structure.sides_at(shard.range.end))]
        made = [t for t, m in zip(left, makers, strict=True) if t is left[0] or m == maker]
        _forms[key] = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in made)
    return _forms[key]


def _pretended(setting: Setting, maker: int) -> tuple[Shard, FakeTensorMode]:
    """The part that makes side tensors, without data, for rows of any length. Its attention and its
    experts are of kinds that run without data and give tensors of the same form."""
    key = (*replace(setting, rows=0, tokens=0).key, maker)
    if key not in _parts:
        from torch._subclasses.fake_tensor import FakeTensorMode

        model = copy.deepcopy(setting.model)
        model._attn_implementation = "eager"
        model._experts_implementation = "batched_mm"
        rng = ShardRange(max(maker, 0), maker + 1, maker < 0, False)
        shard, mode = _shard(replace(setting, model=model), rng), FakeTensorMode()
        with mode:
            _without_data(shard)
        _parts[key] = shard, mode
    return _parts[key]


def _fakes(forms: Iterable[Form]) -> Bundle:
    """Tensors without data, inside a FakeTensorMode."""
    return tuple(
        torch.empty(shape, dtype=dtype, requires_grad=wants) for shape, dtype, wants in forms
    )


def _inputs(setting: Setting) -> dict[str, Tensor]:
    ids_BS = torch.zeros(setting.rows, setting.tokens, dtype=torch.int64)
    mask_BS = torch.ones_like(ids_BS)
    inputs = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": ids_BS.clone()}
    return setting.objective.probe_inputs(setting.model, inputs)


def layer_footprint(
    setting: Setting, layer: int, *, recompute: bool = False, train: bool = True
) -> Footprint | None:
    """The footprint of a layer; None where it cannot be counted. `recompute`: its activations are
    computed again backward. `train`: its input needs a gradient."""
    rng = ShardRange(layer, layer + 1, False, False)
    return _remembered(setting, rng, recompute, train)


def embedding_footprint(setting: Setting) -> Footprint | None:
    """The footprint of the part in front of the layers."""
    return _remembered(setting, ShardRange(0, 0, True, False), False, True)


def head_footprint(setting: Setting) -> Footprint | None:
    """The footprint of the part behind the layers with the loss. Its forward and backward are one,
    so nothing is kept. A loss of many chunks is counted on fewer of the same size: only the
    gradient of the hidden state grows with their number."""
    fewer = setting
    while (chunks := _num_chunks(fewer)) > _MOST_CHUNKS:
        if fewer.rows > 2:  # an even number: rows may be pairs
            fewer = replace(fewer, rows=max(2, fewer.rows // 4 * 2))
        else:
            each = math.ceil((fewer.tokens - 1) * fewer.rows / chunks)
            fewer = replace(fewer, tokens=2 * each + 1)
    last = introspect(setting.model).num_layers
    found = _remembered(fewer, ShardRange(last, last, False, True), False, True)
    if found is None or fewer == setting:
        return found
    more = bundle_bytes(setting, last) - bundle_bytes(fewer, last)
    return Footprint(0, 0, found.forward + more, found.backward + more)


def _num_chunks(setting: Setting) -> int:
    with torch.device("meta"):  # the micro-batch may be larger than this machine's memory
        return setting.objective.num_chunks(setting.model, _inputs(setting))


def _remembered(
    setting: Setting, rng: ShardRange, recompute: bool, train: bool
) -> Footprint | None:
    key = (*setting.key, rng, recompute, train)
    if key not in _counted:
        introspect(setting.model)  # runs a tiny copy, on numbers
        try:
            with _quiet():
                _counted[key] = _count(setting, rng, recompute, train)
        except LIBRARY_ERRORS as error:
            _log.debug("no footprint of %s: %s", rng, error)
            _counted[key] = None
    return _counted[key]


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block torch does not log operations that need data before it raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _count(setting: Setting, rng: ShardRange, recompute: bool, train: bool) -> Footprint:
    from torch._subclasses.fake_tensor import FakeTensorMode

    shard = _shard(setting, rng)
    if recompute:
        shard.recompute_blocks()
    incoming = () if rng.is_first else bundle_at(setting, rng.start)
    seen = setting.pictures or {}
    with FakeTensorMode(allow_non_fake_inputs=bool(seen)), torch.random.fork_rng(devices=[]):
        weights = _without_data(shard)
        inputs = _inputs(setting)
        for name, t in seen.items():
            # A model that can read a mask may do without it.
            is_fake = t.is_floating_point() or name == "attention_mask"
            inputs[name] = torch.empty(t.shape, dtype=t.dtype) if is_fake else t
        received: Bundle = ()
        if not rng.is_first:
            received = crossing(_fakes(incoming))
            received = as_leaves(received) if train else received
        shard.train()
        return _run(setting, shard, inputs, received, weights)


def _run(
    setting: Setting,
    shard: Shard,
    inputs: dict[str, Tensor],
    received: Bundle,
    weights: list[Tensor],
) -> Footprint:
    seen = {n for n in inputs if n.startswith(PICTURES) and inputs[n].is_floating_point()}
    known = [*weights, *(t for name, t in inputs.items() if name not in seen), *received]
    running: Callable[[], AbstractContextManager[Any]] = nullcontext
    if setting.autocast is not None:
        dtype = setting.autocast

        def running() -> AbstractContextManager[Any]:
            return torch.autocast("cpu", dtype)

    with PeakMemory(known, reads=bool(setting.pictures)) as peak:
        if shard.range.is_last:
            loss, backward = setting.objective.loss, torch.Tensor.backward
            items = torch.ones(())
            loss(shard, inputs, received, items, running=running, backward=backward)
            return Footprint(0, 0, peak.most, peak.most)
        entries: list[int] = []

        def entered(place: str | int) -> None:
            if place != "embedding":
                entries.append(peak.made)

        shard.on_enter = entered
        for name in seen:
            peak.add(inputs[name].untyped_storage())
        with running():
            left = shard.forward(inputs, received)
        inputs.clear()  # those of pictures are kept only where autograd does
        kept, forward = peak.now, peak.most - peak.now
        if not any(tensor.requires_grad for tensor in left):
            return Footprint(0, 0, peak.most, 0)
        shared = 0 if shard.range.is_first else peak.held(entries[0])
        peak.most = kept
        differentiate(left, tuple(map(torch.empty_like, returning(left))))
        return Footprint(kept, shared, forward, peak.most - kept)


def _shard(setting: Setting, rng: ShardRange) -> Shard:
    """The shard of a part with its adapter, on the meta device. Kernels that need numbers, such as
    flash attention, are replaced by one that stores as much and has no mask either."""
    model = setting.model
    if model._attn_implementation not in (None, "eager", "sdpa"):
        AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
        model = copy.deepcopy(model)
        model._attn_implementation = _UNMASKED
    sees = rng.is_first and bool(setting.pictures)
    shard = build_shard(model, None, rng, dtype=setting.dtype, device="meta", sees=sees)
    plan = setting.plan
    attach_adapter(shard, replace(plan, weights=None) if plan is not None else None, 0)
    return shard


def _without_data(shard: Shard) -> list[Tensor]:
    """Move a shard from the meta device to CPU tensors without data, with gradients as after the
    first micro-batch. Returns all these tensors."""
    made: list[Tensor] = []
    parameters: dict[nn.Parameter, nn.Parameter] = {}

    def like(tensor: Tensor) -> Tensor:
        made.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return made[-1]

    for module in chain(*(part.modules() for part in (shard.model, *shard.tower_modules))):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in parameters:
                    new = nn.Parameter(like(parameter), requires_grad=parameter.requires_grad)
                    if new.requires_grad:
                        new.grad = like(parameter)
                    parameters[parameter] = new
                module._parameters[name] = parameters[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = like(buffer)
        for name, value in vars(module).items():
            if isinstance(value, Tensor):  # an absent weight's stand-in
                setattr(module, name, like(value))
    return made


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor, *_: object, **__: object) -> Tensor:
    """A product with the matrices of experts, on tensors without data. Torch has it in bfloat16
    alone. `offs` has an entry for each expert."""
    shape = (len(left), right.shape[-1])
    return left.new_empty(shape if right.dim() == 3 else (len(offs), *shape))


def _on_numbers(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation in a FakeTensorMode. Few whole numbers that are made of such alone are computed:
    towers read the sizes of pictures, and the places of their tokens."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)
    with suppress(*LIBRARY_ERRORS):
        found = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if any(t.is_floating_point() or t.numel() > _MOST_NUMBERS for t in made):
            return found
    with unset_fake_temporarily():
        return func(*args, **kwargs)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made within: the most at once (`most`), and now (`now`).
    Tensors on the meta device, `known` tensors, and views of known tensors do not count."""

    def __init__(self, known: Iterable[torch.Tensor] = (), *, reads: bool = False) -> None:
        """`reads`: within a FakeTensorMode, what is made of numbers alone has numbers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.made = 0
        self._reads = reads
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held: dict[int, tuple[int, int]] = {}  # bytes, and how many were made before

    def held(self, made: int) -> int:
        """Bytes now held by the first `made` tensors that were made."""
        return sum(nbytes for nbytes, before in self._held.values() if before < made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _GROUPED_PRODUCT and hasattr(args[0], "fake_mode"):
            func = _grouped_product
        elif self._reads:
            func = partial(_on_numbers, func)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._held:
            self._held[key] = (storage.nbytes(), self.made)
            self.made += 1
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._held.pop(key)[0]
