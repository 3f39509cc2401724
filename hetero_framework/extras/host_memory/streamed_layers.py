"""Layers in host memory that visit the device in the order of their use.

The layers take turns in a few slots of device memory. A layer's tensors always are views of the
same slot, so that what autograd has stored of them is right again once the layer is back. When a
layer is done, its slot takes the next layer in the order at once: ascending in a forward,
descending in a backward, and on into the stage's next task. Layers that are in their slots when the
direction turns are not copied again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor, nn

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.core.spans import AWAITED, WEIGHTS
from hetero_framework.engine.boundary_io import Sender
from hetero_framework.errors import ConfigError, HeteroError
from hetero_framework.extras.host_memory.visiting_weights import VisitingWeights
from hetero_framework.extras.host_memory.visitors import HostTensors, Visitors, in_pieces
from hetero_framework.models.adapters.trainable import trainable_parameters
from hetero_framework.models.cut.introspect import BlockForm
from hetero_framework.models.cut.language import tower_layers
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.sizing.streaming import (
    SLOTS,
    layers_in_turn,
    slot_of,
    slot_sizes,
    spread,
)
from hetero_framework.units import plural, size

_ALIGNED_BYTES = 512  # as torch's allocators align
_BUFFER_BYTES = 16 << 20
_LONGEST_S = 600.0
_log = logging.getLogger(__name__)

Ends = tuple[DeviceEvent, DeviceEvent]
"""Beginning and end of a copy."""


def load_streamed(
    load: Callable[[ShardRange, ReusableModules], Shard],
    rng: ShardRange,
    kept: ReusableModules,
    device: Device,
    count: int,
    *,
    trains: bool = False,
) -> tuple[Shard, StreamedLayers]:
    """Load a shard with `count` of its layers in host memory. The device never holds more than the
    part that stays there and a few layers. With `trains` trained weights of the layers are there
    too; else they stay on the device, as an adapter does. Raises ConfigError for layers that differ
    from what is stored."""
    chosen = spread(count, rng.start, rng.end)
    blocks, read, trained = dict(kept.blocks), dict(kept.fingerprint), dict[str, Tensor]()
    hosts, memory = dict[int, HostLayer](), HostTensors(device)
    for start in range(rng.start, rng.end, SLOTS):
        part = ShardRange(start, min(start + SLOTS, rng.end), False, False)
        here = range(part.start, part.end)
        there = {k: kept.blocks[k] for k in here if k in kept.blocks}
        shard = load(part, ReusableModules(there, {}, kept.fingerprint))
        # The adapter is attached while the layer is here: some begin from the layer's weights.
        learned = [] if trains else trainable_parameters(shard)
        trained |= {name: p.detach().clone() for name, p in learned}
        modules = shard.dissolve(is_new=True)
        _admit(k for k in here if k not in modules.blocks)
        for k in here:
            if k in chosen:
                staying = {id(p) for _, p in learned}
                own, left = (memory if trains else None), count - len(hosts)
                hosts[k] = HostLayer(device, modules.blocks[k], staying, own, left)
        blocks |= modules.blocks
        read |= modules.fingerprint
        del shard, modules, learned
        device.empty_cache()
    layers = StreamedLayers(device, hosts, is_last=rng.is_last)
    layers.tell()
    shard = load(rng, ReusableModules(blocks, kept.outside, read))
    with torch.no_grad():
        for name, parameter in trainable_parameters(shard):
            if name in trained:
                parameter.copy_(trained[name])
    return shard, layers


def stream_tower(device: Device, tower: nn.Module) -> StreamedLayers:
    """Keep the layers of a frozen tower in host memory; they visit in the order of its forward."""
    layers = tower_layers(tower)
    hosts = {k: HostLayer(device, layer) for k, layer in enumerate(layers)}
    visitors = StreamedLayers(device, hosts, is_last=False)
    for k, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, k=k: visitors._use(k))
        layer.register_forward_hook(lambda *_, k=k: visitors._done(k))
    return visitors


def _admit(absent: Iterable[int]) -> None:
    """Raise ConfigError where one of a part's layers cannot be used again."""
    for k in absent:
        raise ConfigError(
            f"layer {k} cannot stay in host memory: the run changes it before it trains, or it"
            " shares weights with another layer",
            hint="take offload out of shard_plan",
        )


class HostLayer:
    """The tensors of `block` in host memory, without parameters that are `staying` (by id).
    `place_in` makes them views of a slot. Layers that are trained have a `memory`, in which each
    tensor is in one piece, for `left` layers like this one."""

    def __init__(
        self,
        device: Device,
        block: nn.Module,
        staying: Container[int] = (),
        memory: HostTensors | None = None,
        left: int = 1,
    ) -> None:
        self._places: list[tuple[Any, str, Tensor, int]] = []
        self.nbytes, offsets = 0, dict[int, int]()
        self.homes: dict[nn.Parameter, Tensor] = {}
        """Trained weights, where they are between steps."""
        for holder, name, tensor in _block_tensors(block, staying):
            if tensor.data_ptr() not in offsets:
                offsets[tensor.data_ptr()] = self.nbytes
                self.nbytes += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            self._places.append((holder, name, tensor, offsets[tensor.data_ptr()]))
        staged = torch.empty(self.nbytes, dtype=torch.uint8, device=device.torch_device)
        for _, _, tensor, offset in self._places:
            _view(staged, offset, tensor).copy_(tensor)
        if memory is None:
            self._parts, self.plain_bytes = in_pieces(device, self.nbytes)
        else:
            self._parts, before = [], memory.plain_bytes
            memory.expect(left * self.nbytes)
            for holder, _, tensor, offset in self._places:
                self._parts.append((offset, memory.take(tensor.nbytes)))
                if getattr(holder, "requires_grad", False):
                    self.homes[holder] = _view(self._parts[-1][1], 0, tensor)
            self.plain_bytes = memory.plain_bytes - before
        for part, piece in self.copies_to(staged):
            piece.copy_(part)
        for k, (holder, name, tensor, offset) in enumerate(self._places):
            self._places[k] = (holder, name, torch.empty_like(tensor, device="meta"), offset)
            setattr(holder, name, torch.empty(0, dtype=tensor.dtype, device=device.torch_device))

    def place_in(self, slot: Tensor) -> None:
        for holder, name, form, offset in self._places:
            setattr(holder, name, _view(slot, offset, form))

    def leave(self, device: Device) -> None:
        """Keep no memory of a slot: the tensors have their form and no contents."""
        for holder, name, form, _ in self._places:
            one = torch.empty(1, dtype=form.dtype, device=device.torch_device)
            setattr(holder, name, one.expand(form.shape))

    def copies_to(self, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (target, source) that copy all bytes of the layer into a slot."""
        return [(slot[begin : begin + len(part)], part) for begin, part in self._parts]


class StreamedLayers(Visitors):
    """The streamed layers of one stage."""

    misses: int = 0

    def __init__(
        self, device: Device, hosts: dict[int, HostLayer], *, is_last: bool, in_turn: int = SLOTS
    ) -> None:
        """`in_turn` is the number of slots that layers share."""
        super().__init__(device)
        self._is_last = is_last
        self._layers = [hosts[k] for k in sorted(hosts)]
        self._position = {k: position for position, k in enumerate(sorted(hosts))}
        count = len(hosts)
        self._shared, self._in_turn = in_turn, layers_in_turn(count, in_turn)
        self._slot = [slot_of(position, count, in_turn) for position in range(count)]
        self._sizes = slot_sizes([layer.nbytes for layer in self._layers], in_turn)
        self._slots: list[Tensor] = []
        self._place()
        self._there: dict[int, int] = {}  # slot: the layer that is in it, or on its way
        self._arriving: dict[int, Future[Ends]] = {}
        self._direction = self._following = FORWARD
        self.weights = VisitingWeights(device, [layer.homes for layer in self._layers])
        self._plain_bytes = sum(layer.plain_bytes for layer in self._layers)
        self._feeder = Feeder(device) if self._plain_bytes and device.is_async else None
        self.end()

    def accompany(self, shard: Shard) -> None:
        shard.accompany_blocks(self.around)

    def around(
        self, index: int, form: BlockForm, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap the forward of a layer, for `Shard.accompany_blocks`."""
        if index not in self._position:
            return forward
        position = self._position[index]

        def visited(*args: Any, **kwargs: Any) -> Any:
            self._use(position)
            output = forward(*args, **kwargs)
            if self.weights.homes:
                torch.clear_autocast_cache()  # it would hold halved weights of all layers
            if self._direction == BACKWARD:
                return output  # computed again; its backward follows
            # A tensor's hook runs when all that was made of the tensor has been differentiated.
            entered, left = form.hidden(args, kwargs), form.take(output)
            if left.requires_grad:
                left.register_hook(lambda _: self._begin_backward(position))
            if entered.grad_fn is not None:  # a leaf may be done before all that is made of it
                entered.register_hook(lambda _: self._done(position))
            self._done(position)
            return output

        return visited

    def tell(self) -> None:
        """Log how much memory the layers take, and what to do where copies are slow."""
        _log.info(
            "%s in host memory: %s; %s of the device to visit",
            plural(len(self._layers), "layer"),
            size(sum(layer.nbytes for layer in self._layers)),
            size(sum(self._sizes)),
        )
        if self._feeder is not None:
            _log.warning(
                "%s of it are not pinned, for the system gives no more: their copies are slower."
                " Raise the limit of locked memory (ulimit -l; docker run --ulimit memlock=-1;"
                " memory in .wslconfig under WSL 2), or keep fewer layers there",
                size(self._plain_bytes),
            )

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        self._direction, self._following = kind, following
        if not self._is_placed:
            self._place()
            self.changed()

    def go_home(self) -> None:
        if self.weights.homes:
            self._is_placed = False
            for parameter, home in self.weights.homes.items():
                parameter.data = home

    def lend(self) -> None:
        """Free the slots until `changed`: the optimizer's groups visit in the same memory."""
        if self.weights.homes:
            self._forget()
            self._slots, self._is_placed = [], False
            for layer in self._layers:
                layer.leave(self._device)

    def _place(self) -> None:
        self._is_placed, where = True, self._device.torch_device
        if not self._slots:
            self._slots = [torch.empty(n, dtype=torch.uint8, device=where) for n in self._sizes]
        for layer, slot in zip(self._layers, self._slot, strict=True):
            layer.place_in(self._slots[slot])

    def changed(self) -> None:
        """Fetch the layers again: their weights have been written at home."""
        if self.weights.homes:
            self._forget()
            if not self._slots:
                self._place()
            self.end()

    def _forget(self) -> None:
        """Have no layer in a slot, and none on its way."""
        settle(self._arriving.values())
        self._arriving, self._there = {}, {}

    def end(self) -> None:
        """Fetch the first layers of the next task, unless they are there or on their way."""
        order = range(self._in_turn)
        forward = self._following == FORWARD
        first = order[: self._shared] if forward else order[::-1][: self._shared]
        for position in (*first, *range(self._in_turn, len(self._layers))):
            if self._there.get(self._slot[position]) != position:
                self._fetch(position)

    def dissolve(self, modules: ReusableModules) -> ReusableModules:
        """End once no copy is on its way. Returns the modules without the streamed layers."""
        settle(self._arriving.values())
        self.weights.close()
        if self._feeder is not None:
            self._feeder.close()
        blocks = {k: block for k, block in modules.blocks.items() if k not in self._position}
        return ReusableModules(blocks, modules.outside, modules.fingerprint)

    def _begin_backward(self, position: int) -> None:
        self._direction = BACKWARD
        self._use(position)
        for ahead in (position, position - 1):
            self.weights.expect(ahead)

    def _use(self, position: int) -> None:
        """Make all work that this thread queues from now on wait for a layer."""
        slot = self._slot[position]
        if self._there.get(slot) != position:
            self.misses += 1
            self._fetch(position)
        if (delivery := self._arriving.pop(position, None)) is not None:
            asked = self._device.record_event()
            del self._there[slot]  # a step done again must not find a layer that has not come
            began, there = ends_of(delivery)
            self._transfers += [(WEIGHTS, began, there), (AWAITED, asked, there)]
            self._device.order_behind(there)
            self._there[slot] = position

    def _done(self, position: int) -> None:
        """Give a layer's slot to the next layer: all its work in this direction is queued."""
        if position >= self._in_turn or self._there.get(self._slot[position]) != position:
            return  # the model has left out a layer, and the next one is here already
        ahead = position + (self._shared if self._direction == FORWARD else -self._shared)
        if not 0 <= ahead < self._in_turn:
            turns = self._is_last and self._direction == FORWARD and torch.is_grad_enabled()
            if turns or self._following != self._direction:
                return  # the same layer is used next
            ahead %= self._in_turn
        self._fetch(ahead)

    def _fetch(self, position: int) -> None:
        """Queue a layer's copy into its slot, after all queued work with the layer in it."""
        slot = self._slot[position]
        copies = self._layers[position].copies_to(self._slots[slot])
        queued = self._device.record_event()
        self._there.pop(slot, None)
        if self._feeder is not None:
            delivery = self._feeder.copy(copies, queued)
        else:
            delivery = Future[Ends]()
            delivery.set_result(self._device.queue_copies(copies, "weights", queued))
        self._there[slot], self._arriving[position] = position, delivery


def _block_tensors(block: nn.Module, staying: Container[int]) -> Iterator[tuple[Any, str, Tensor]]:
    """(holder, attribute, tensor) of each weight of a block, and of its statistics where it
    is quantised. Small tensors (tables, buffers) and non-contiguous ones stay on the device."""
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in staying or not parameter.is_contiguous() or not parameter.numel():
                continue
            yield parameter, "data", parameter.data
            state = getattr(parameter, "quant_state", None)  # bitsandbytes: 4 bits, then 8 bits
            nested = getattr(state, "state2", None)
            of_module = getattr(module, "state", None)
            for holder in (state, nested, parameter, of_module):
                for name in ("absmax", "CB", "SCB"):
                    tensor = getattr(holder, "__dict__", {}).get(name)
                    if isinstance(tensor, Tensor) and tensor.is_contiguous():
                        yield holder, name, tensor


def _view(memory: Tensor, offset: int, form: Tensor) -> Tensor:
    # `.data` has a version of its own: to autograd a copy into the slot changes no weight.
    return memory[offset : offset + form.nbytes].view(form.dtype).view(form.shape).data


def ends_of(delivery: Future[Ends]) -> Ends:
    """The beginning and end of a copy. Waits until it is queued, and raises what reading raised."""
    try:
        return delivery.result(_LONGEST_S)
    except TimeoutError:
        raise HeteroError(
            f"a layer could not be copied from host memory within {_LONGEST_S:.0f} s",
            hint="the machine's memory is swapped out, or its device hangs",
        ) from None


def settle(deliveries: Iterable[Future[Ends]]) -> None:
    """Wait until copies are over. Copies' errors are not raised: tracebacks hold the slots."""
    for delivery in wait(deliveries, _LONGEST_S).done:
        if delivery.exception() is None:
            delivery.result()[1].wait()


class Feeder:
    """Copies memory that is not pinned to the device, in a thread that begins with the first copy.

    A copy from such memory blocks the thread that asks for it until the device has come to the
    copy. So another thread reads the bytes into two pinned buffers in turn, and queues the buffers'
    copies to the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = Sender(lambda error: None, _LONGEST_S)
        self._buffers = deque((device.host_bytes(_BUFFER_BYTES), DeviceEvent()) for _ in range(2))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: DeviceEvent) -> Future[Ends]:
        """Copy the second tensor of each pair into the first, after `after`. Both are bytes."""
        delivery = Future[Ends]()

        def job() -> None:
            try:
                delivery.set_result(self._copied(pairs, after))
            except Exception as error:
                delivery.set_exception(error)  # for the thread that waits for it

        self._thread.submit(job)
        return delivery

    def close(self) -> None:
        self._thread.close()

    def _copied(self, pairs: Sequence[tuple[Tensor, Tensor]], after: DeviceEvent) -> Ends:
        ends: list[DeviceEvent] = []
        for target, source in pairs:
            parts = zip(target.split(_BUFFER_BYTES), source.split(_BUFFER_BYTES), strict=True)
            for part, data in parts:
                memory, copied = self._buffers[0]
                copied.wait()
                buffer = memory[: len(data)]
                buffer.copy_(data)
                ends += self._device.queue_copies([(part, buffer)], "weights", after)
                self._buffers[0] = memory, ends[-1]
                self._buffers.rotate()
        return ends[0], ends[-1]
