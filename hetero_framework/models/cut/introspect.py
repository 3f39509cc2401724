"""The structure of a causal language model, learned from one forward of a tiny copy of it.

Nothing here knows an architecture. While a tiny model of the same class runs once, hooks watch the
candidates for the list of blocks, and a function mode sees where each weight is used. Names and
layer counts are the real model's: only widths were shrunk.

Shapes: B rows, S tokens, D hidden size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.codebooks import for_model, ids_per_token
from hetero_framework.models.cut.family import family_of
from hetero_framework.models.cut.language import (
    WeightUses,
    meta_model,
    model_class,
    no_tiny_copy,
    run_on_text,
)
from hetero_framework.models.cut.side import Call, Report, Side, Way, hollow, tensors_at
from hetero_framework.models.cut.tiny import PROBE_ROWS, PROBE_TOKENS, probe_inputs, shrink, task_of
from hetero_framework.models.library import LIBRARY_ERRORS, quiet_library
from hetero_framework.models.rng import seed_cpu

IDS = -2
"""The level of tensors computed from the token ids alone, without weights."""

# Operations whose results have the shape of a tensor and none of its numbers.
_SHAPE_ONLY = {
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "empty_like",
    "full_like",
    "ones_like",
    "zeros_like",
}
_PER_LAYER = re.compile(r".*(layer|block)_?types?$")
_learned: dict[str, ModelStructure] = {}  # by configuration, in this process


@dataclass(frozen=True)
class BlockForm:
    """Where a block's hidden state comes in and goes out: `entry` is a position or keyword, `exit`
    the index in a tuple of `exit_length` items (None: the block returns the tensor itself)."""

    entry: int | str
    exit: int | None
    exit_length: int

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden state among a call's arguments."""
        entry = self.entry
        hidden: torch.Tensor = args[entry] if isinstance(entry, int) else kwargs[entry]
        return hidden

    def replace(
        self, hidden_BSD: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This call with another hidden state."""
        if isinstance(self.entry, int):
            return (*args[: self.entry], hidden_BSD, *args[self.entry + 1 :]), kwargs
        return args, {**kwargs, self.entry: hidden_BSD}

    def take(self, output: Any) -> torch.Tensor:
        """The hidden state in a block's output."""
        hidden: torch.Tensor = output if self.exit is None else output[self.exit]
        return hidden

    def wrap(self, hidden_BSD: torch.Tensor) -> Any:
        """An output that holds only this hidden state."""
        if self.exit is None:
            return hidden_BSD
        return tuple(hidden_BSD if i == self.exit else None for i in range(self.exit_length))


@dataclass(frozen=True)
class ModelStructure:
    """Where the parts of a model are.

    `owner` says which stage has a trained parameter outside the blocks: -1 the first, i the stage
    of block i, `num_layers` the last. `shared` gives the blocks (-1: before the first) beside which
    a parameter is used, if more than one. `sides` are the tensors that cross boundaries beside the
    hidden state. `id_readers` are the blocks that read values of the token ids alone. `holders` are
    the blocks whose received hidden state the model itself still uses after them. `reports` are the
    calls in blocks whose outputs the model uses behind all blocks, in order. `running` are the
    blocks that run; blocks that text alone does not reach stay as they are. `hidden_shape` is a
    hidden state's shape in the tiny copy, whose hidden size is `tiny_width`. A hidden state has
    `token_factor` tokens for each token of the text (ProphetNet predicts several), and
    `more_tokens` that the model adds to each row (a prompt of CPM-Ant's). A token of the text has
    `ids_per_token` ids (`codebooks.py`). `takes_embeddings`: what blocks receive beside the hidden
    state is the same for embeddings as for token ids. `reaches_into_blocks`: the model uses weights
    of its blocks (to rescale them) before it runs them. `loss_counts_items`: its own loss is the
    sum over tokens divided by `num_items_in_batch`, plus other terms. `statistics` are the buffers
    of blocks that training changes.
    """

    model_class: type[PreTrainedModel]
    blocks: str
    forms: tuple[BlockForm, ...]
    running: tuple[int, ...]
    sides: tuple[Side, ...]
    hidden_shape: tuple[int, ...]
    tiny_width: int
    owner: dict[str, int] = field(default_factory=dict)
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    id_readers: frozenset[int] = frozenset()
    holders: frozenset[int] = frozenset()
    reports: tuple[Report, ...] = ()
    token_factor: int = 1
    more_tokens: int = 0
    ids_per_token: int = 1
    takes_embeddings: bool = False
    reaches_into_blocks: bool = False
    loss_counts_items: bool = False
    statistics: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.forms)

    @property
    def streams(self) -> int:
        """Numbers per token in the tiny copy's hidden state, as a multiple of the hidden size."""
        tokens = PROBE_ROWS * self.hidden_tokens(PROBE_TOKENS * self.ids_per_token)
        return max(1, math.prod(self.hidden_shape) // (tokens * self.tiny_width))

    def hidden_tokens(self, ids: int) -> int:
        """Tokens of a hidden state, for a micro-batch with `ids` ids per row."""
        return self.token_factor * math.ceil(ids / self.ids_per_token) + self.more_tokens

    def sides_at(self, boundary: int) -> tuple[Side, ...]:
        """Side tensors at the entry of block `boundary`, in order."""
        return tuple(side for side in self.sides if side.crosses(boundary))

    def reads_ids(self, start: int, end: int) -> bool:
        """Whether one of the blocks `[start, end)` needs the token ids."""
        return any(start <= block < end for block in self.id_readers)


def introspect(config: PretrainedConfig) -> ModelStructure:
    """Learn the structure of `config`'s model. Raises ArchitectureError when it cannot be cut, or
    when its tiny copy does not run."""
    try:
        asked = as_text(config)
        if asked not in _learned:  # also for itself: making the tiny one takes 3 ms each time
            with quiet_library():
                _learned[asked] = _structure(config)
        return _learned[asked]
    except LIBRARY_ERRORS as error:
        raise no_tiny_copy(config, error) from error


def as_text(config: PretrainedConfig) -> str:
    """All settings of a model, to remember by them what was found of it."""
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def _structure(config: PretrainedConfig) -> ModelStructure:
    if (family := family_of(config)) is not None:
        structure: ModelStructure = family.structure(config)
        return structure
    tiny = shrink(config)
    if (key := as_text(tiny)) not in _learned:
        with torch.random.fork_rng(devices=[]):
            seed_cpu(0)
            _learned[key] = _learn(model_class(tiny), tiny)
    return _learned[key]


def _learn(cls: type[PreTrainedModel], config: PretrainedConfig) -> ModelStructure:
    model = cls._from_config(config)
    model.train(False)
    constant = {name for name, p in model.named_parameters() if not p.requires_grad}
    count = ids_per_token(model)
    inputs, fewer = (
        for_model(probe_inputs(config, tokens=tokens, ids_per_token=count), count)
        for tokens in (PROBE_TOKENS, PROBE_TOKENS - 2)
    )
    blocks, watch = _find_blocks(model, inputs)
    if (width := getattr(config.get_text_config(), "hidden_size", None)) is None:
        raise ArchitectureError(
            f"a {config.model_type} model has no one hidden size: its blocks ({blocks}) do not work"
            " on the text's tokens, and what they work on would have to be described"
        )
    factor, more = _tokens_of(model, blocks, watch, fewer)
    return ModelStructure(
        model_class=cls,
        blocks=blocks,
        forms=watch.forms(),
        running=tuple(watch.order),
        owner=_owners(model, blocks, watch, constant),
        shared=_shared(blocks, watch),
        sides=(*watch.sides(), *dict.fromkeys(side for r in watch.reports for _, side in r.parts)),
        id_readers=frozenset(watch.id_readers),
        holders=frozenset(watch.holders),
        reports=watch.reports,
        hidden_shape=watch.hidden_shape,
        tiny_width=int(width),
        token_factor=factor,
        more_tokens=more,
        ids_per_token=count,
        takes_embeddings=_takes_embeddings(model, blocks, watch, inputs),
        reaches_into_blocks=any(
            min(phases) < 0 for n, phases in watch.phases.items() if n.startswith(f"{blocks}.")
        ),
        # The loss over several codebooks takes labels of another layout, of the next tokens.
        loss_counts_items=count == 1
        and task_of(config) == "causal-lm"
        and _loss_counts_items(model, inputs),
    )


def _find_blocks(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> tuple[str, _Watch]:
    """The list of blocks: the heaviest ModuleList whose members run once each, in order. Without
    one, members that do not run are allowed (those that attend to images)."""
    candidates = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    candidates.sort(key=lambda c: -c[0])
    reasons: list[str] = []
    again = False  # whether blocks run more than once
    in_part: list[tuple[str, _Watch]] = []
    for _, name, module in candidates:
        if any(name.startswith(f"{other}.") for other in reasons):
            continue
        watch = _watched(model, module, inputs)
        if watch.order == list(range(len(module))):
            return name, watch
        if watch.order and watch.order == sorted(set(watch.order)):
            in_part.append((name, watch))
        again |= len(watch.order) > len(set(watch.order))
        reasons.append(name)
    if in_part:
        return in_part[0]
    raise ArchitectureError(
        f"{type(model).__name__} has no list of blocks that run once each, in order"
        + (f" (looked at {', '.join(reasons)})" if reasons else "")
        + ("; a micro-batch would have to go through a stage several times" if again else ""),
        hint="only models whose layers form one chain can be cut",
    )


def _watched(
    model: PreTrainedModel, blocks: nn.ModuleList, inputs: dict[str, torch.Tensor]
) -> _Watch:
    """A record of one forward of the model."""
    watch = _Watch(model, blocks, inputs["input_ids"])
    left_out = {"labels"} | ({"input_ids"} if "inputs_embeds" in inputs else set())
    with torch.enable_grad(), watch.provenance, watch:
        run_on_text(model, {k: v for k, v in inputs.items() if k not in left_out})
    return watch


def _tokens_of(
    model: PreTrainedModel, blocks: str, watch: _Watch, fewer: dict[str, torch.Tensor]
) -> tuple[int, int]:
    """(`token_factor`, `more_tokens`) of a `ModelStructure`. If the hidden state has not as many
    tokens as the text, a second forward runs on `fewer`, inputs with fewer tokens."""
    most = _tokens(watch)
    if most == PROBE_TOKENS:
        return 1, 0
    modules: Any = model.get_submodule(blocks)
    least, tokens = _tokens(_watched(model, modules, fewer)), fewer["input_ids"].shape[1]
    factor = (most - least) // (PROBE_TOKENS - tokens)
    return factor, most - factor * PROBE_TOKENS


def _takes_embeddings(
    model: PreTrainedModel, blocks: str, watch: _Watch, inputs: dict[str, torch.Tensor]
) -> bool:
    """See `ModelStructure.takes_embeddings`; `watch` saw the `inputs`."""
    if watch.sides() or watch.id_readers or ids_per_token(model) > 1:
        return False  # what blocks read of the ids cannot be computed from embeddings
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return False
    width = cast(Any, model.get_input_embeddings()).weight.shape[-1]
    zeros = torch.zeros(*inputs["input_ids"].shape, width, dtype=model.dtype)
    modules: Any = model.get_submodule(blocks)
    try:
        other = _watched(model, modules, {**inputs, "inputs_embeds": zeros}).independent
    except ArchitectureError:
        return False
    alike = (torch.equal(t, other[at]) for at, t in watch.independent.items() if at in other)
    return watch.independent.keys() <= other.keys() and all(alike)


def _tokens(watch: _Watch) -> int:
    """Tokens per row of the hidden state: the size of the axis beside the rows."""
    pairs = [pair for pair in itertools.pairwise(watch.hidden_shape[:-1]) if PROBE_ROWS in pair]
    return max(max(pair) for pair in pairs) if pairs else PROBE_TOKENS


class _Watch(WeightUses):
    """Watches one forward: calls of the blocks, and the phase in which each weight is used: 2 i
    while block i runs, 2 i + 1 after it and before the next, -1 before the first."""

    def __init__(self, model: PreTrainedModel, blocks: nn.ModuleList, ids: torch.Tensor) -> None:
        super().__init__(model)
        self._blocks = blocks
        self.provenance = Provenance(ids, [p for p in model.parameters() if p.requires_grad])
        self._handles: list[Any] = []
        self.order: list[int] = []
        self.calls: list[Call] = []
        self.outputs: list[Any] = []
        self.phases: dict[str, set[int]] = {}
        # (block, module in it, its output) of every call.
        self._inside: list[tuple[int, str, Any]] = []
        pairs = tied_names(model).items()
        paths = {name.rpartition(".")[0] for pair in pairs for name in pair}
        self._tied = {path: model.get_submodule(path) for path in sorted(paths)}
        # By path of a module with tied weights, the phases in which the module ran.
        self.ran: dict[str, set[int]] = {}
        # What each block received, copied when the block began: containers change later.
        self._received: list[list[tuple[Way, torch.Tensor, Any]]] = []  # with its graph

    def __enter__(self) -> _Watch:
        for index, block in enumerate(self._blocks):
            before = functools.partial(self._before, index)
            self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(block.register_forward_hook(functools.partial(self._after, index)))
            for name, module in block.named_modules():
                seen = functools.partial(self._seen, index, name)
                self._handles.append(module.register_forward_hook(seen))
        for path, module in self._tied.items():
            runs = functools.partial(self._runs, path)
            self._handles.append(module.register_forward_pre_hook(runs))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _runs(self, path: str, module: nn.Module, args: Any) -> None:
        self.ran.setdefault(path, set()).add(self.provenance.phase)

    def _before(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.provenance.phase = 2 * index
        self.order.append(index)
        self.calls.append((args, kwargs))
        for _, hidden_BSD in itertools.islice(_followed(args, kwargs), 1):
            self.provenance.received(hidden_BSD, index)
        tensors = tensors_at((args, kwargs))
        self._received.append([(path, tensor, tensor.grad_fn) for path, tensor in tensors])

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self.provenance.phase = 2 * index + 1
        self.outputs.append(output)

    def _seen(self, index: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name:
            self._inside.append((index, name, output))

    def on_use(self, name: str) -> None:
        self.phases.setdefault(name, set()).add(self.provenance.phase)

    def forms(self) -> tuple[BlockForm, ...]:
        """How each block was called; a block that does not run has its neighbour's form. Raises
        ArchitectureError if no hidden state passes."""
        calls = zip(self.order, self.calls, self.outputs, strict=True)
        seen = {i: BlockForm(_entry(i, *call), *_exit(i, output)) for i, call, output in calls}
        nearest = (max((k for k in self.order if k <= i), default=self.order[0]) for i in self._all)
        return tuple(seen[k] for k in nearest)

    @property
    def _all(self) -> range:
        return range(len(self._blocks))

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """See `ModelStructure.hidden_shape`."""
        return tuple(self._hidden[0].shape)

    @property
    def _hidden(self) -> list[torch.Tensor]:
        """The hidden state that each block received."""
        forms = self.forms()
        calls = zip(self.order, self.calls, strict=True)
        return [forms[block].hidden(*call) for block, call in calls]

    @property
    def independent(self) -> dict[tuple[int, Way], torch.Tensor]:
        """By block and place, the received values that depend on neither token ids nor weights."""
        return {
            (block, path): tensor
            for block, received in zip(self.order, self._received, strict=True)
            for path, tensor, _ in received
            if self.provenance.level(tensor) is None
        }

    @functools.cached_property
    def _besides(self) -> list[tuple[int, Way, torch.Tensor, Any, int]]:
        """(block, place, tensor, graph, level) of tensors that blocks receive and read beside the
        hidden state."""
        entries, forms = [], self.forms()
        for block, received in zip(self.order, self._received, strict=True):
            form = forms[block]
            for path, tensor, graph in received:
                level = self.provenance.level(tensor)
                is_hidden = [key for _, key in path[1:]] == [form.entry]
                if level is None or is_hidden or not self.provenance.is_read(tensor, block):
                    continue
                entries.append((block, path, tensor, graph, level))
        return entries

    def sides(self) -> tuple[Side, ...]:
        """See `ModelStructure.sides`."""
        by_tensor: dict[int, list[tuple[int, Way, torch.Tensor, Any, int]]] = {}
        for entry in self._besides:
            if entry[4] != IDS:
                by_tensor.setdefault(id(entry[2]), []).append(entry)
        sides = []
        for entries in by_tensor.values():
            block, path, tensor, graph, level = entries[0]
            places = tuple((entry[0], entry[1]) for entry in entries)
            name = _argument_name(self._blocks[block], path)
            held, form = self.provenance.is_held(tensor, block), (tuple(tensor.shape), tensor.dtype)
            sides.append(Side(name, level, places, held, *form, self._weights_of(graph)))
        return tuple(sides)

    def _weights_of(self, graph: Any) -> frozenset[str]:
        """The names of the weights that a tensor with this graph depends on."""
        weights: set[str] = set()
        seen, waiting = {graph}, [graph]
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            weights.update(self._names.get(id(getattr(node, "variable", None)), ()))
            new = {before for before, _ in node.next_functions} - seen
            seen |= new
            waiting += new
        return frozenset(weights)

    @functools.cached_property
    def reports(self) -> tuple[Report, ...]:
        """See `ModelStructure.reports`."""
        last = self.order[-1]
        top = self.forms()[last].take(self.outputs[-1])
        sides: dict[int, Side] = {}
        reports = []
        for block, module, output in self._inside:
            parts = []
            for path, tensor in tensors_at(output):
                provenance = self.provenance
                if provenance.shares(tensor, top) or not provenance.is_held(tensor, last):
                    continue
                places = ((len(self._blocks), ()),)
                form = tuple(tensor.shape), tensor.dtype
                weights = self._weights_of(tensor.grad_fn)
                name = ".".join([module, *(str(key) for _, key in path)])
                side = Side(name, block, places, False, *form, weights)
                parts.append((path, sides.setdefault(id(tensor), side)))
            if parts:
                reports.append(Report(block, module, hollow(output), tuple(parts)))
        return tuple(reports)

    @property
    def holders(self) -> set[int]:
        """See `ModelStructure.holders`."""
        received = zip(self.order, self._hidden, strict=True)
        return {block for block, tensor in received if self.provenance.is_held(tensor, block)}

    @property
    def id_readers(self) -> set[int]:
        """See `ModelStructure.id_readers`."""
        return {entry[0] for entry in self._besides if entry[4] == IDS}


class Provenance(TorchDispatchMode):
    """The origin of each tensor in one forward, as a level. A dispatch mode sees every operation,
    also those inside autograd functions and compiled scripts. It records origins by storage, so
    that views and writes in place need no special care.

    A level is the last part of the model that computed on a tensor: -1 the part before the blocks,
    i block i; None: it depends on neither ids nor trained weights. `phase` is where the forward
    stands: 2 i while block i runs, 2 i + 1 after it and before the next, -1 before the first.
    Tensors made in block i have the level i, even a mask: only a shard with the block can make
    them. Tensors made after block i of the hidden state that it `received` have the level i, too.
    """

    def __init__(self, ids: torch.Tensor, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = -1
        self._weights = {_storage(weight) for weight in weights}
        self._levels = {_storage(ids): IDS}
        self._read: dict[int, set[int]] = {}
        self._received: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage's address is used again

    def received(self, hidden_BSD: torch.Tensor, block: int) -> None:
        """Note that a block begins, with this hidden state."""
        self._received[_storage(hidden_BSD)] = block

    def level(self, tensor: torch.Tensor) -> int | None:
        """The level of a tensor; see the class."""
        return self._levels.get(_storage(tensor))

    def is_read(self, tensor: torch.Tensor, block: int) -> bool:
        """Whether an operation in this block takes the tensor, or another view of its memory."""
        return _storage(tensor) in self._read.get(2 * block, ())

    @staticmethod
    def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors are views of one memory."""
        return _storage(one) == _storage(other)

    def is_held(self, tensor: torch.Tensor, block: int) -> bool:
        """Whether the model's own code uses the tensor after this block. Then the tensor in the
        model's variable has to be replaced, not the block's argument."""
        return any(
            phase > 2 * block and phase % 2 and _storage(tensor) in read
            for phase, read in self._read.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = [_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._alive += made
        inside = self.phase >= 0 and self.phase % 2 == 0
        changed = set(map(_storage, made)) - set(read) | self._written(func, args, kwargs)
        if inside or changed:  # a view that the model takes between its blocks is not yet a use
            self._read.setdefault(self.phase, set()).update(read)
        shape_only = func._schema.name.removeprefix("aten::") in _SHAPE_ONLY
        levels = [] if shape_only else [level for s in read if (level := self._of(s)) is not None]
        if inside:
            levels.append(self.phase // 2)
        if levels:
            for storage in changed:
                self._levels[storage] = max(self._levels.get(storage, IDS), *levels)
        return result

    def _of(self, storage: int) -> int | None:
        # A weight between the blocks belongs to the block before it; see `ModelStructure.owner`.
        if storage in self._weights:
            return self.phase // 2
        level = self._levels.get(storage)
        return level if level is None else max(level, self._received.get(storage, level))

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """The storages that an operation changes."""
        storages = set()
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                storages |= {_storage(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
        return storages


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _argument_name(block: nn.Module, path: Way) -> str:
    """Words for a place in a block's call."""
    (_, argument), *rest = path[1:]
    if isinstance(argument, int):
        parameters = list(inspect.signature(block.forward).parameters)
        named = argument < len(parameters)
        argument = parameters[argument] if named else f"argument {argument}"
    return ".".join([argument, *(str(key) for _, key in rest)])


def _entry(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    for name, _ in _followed(args, kwargs):
        return name
    raise ArchitectureError(f"block {index} receives no hidden state as an argument")


def _followed(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[int | str, torch.Tensor]]:
    """Arguments that autograd follows, by position or keyword: the hidden state is the first."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            yield name, value


def _exit(index: int, output: Any) -> tuple[int | None, int]:
    if isinstance(output, torch.Tensor):
        return None, 1
    if isinstance(output, (tuple, list)):
        for slot, value in enumerate(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return slot, len(output)
    raise ArchitectureError(
        f"block {index} returns {type(output).__name__}, which holds no hidden state that autograd"
        " follows: the model's own code goes backward through its blocks, and would have to do so"
        " for a part of them"
    )


def _owners(
    model: PreTrainedModel, blocks: str, watch: _Watch, constant: set[str]
) -> dict[str, int]:
    """See `ModelStructure.owner`. Constants (frozen parameters, such as tables of sines) have no
    owner: all stages need them."""
    last, behind = watch.order[-1], len(watch.forms())
    tied = tied_names(model)
    owner = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name.startswith(f"{blocks}.") or name in constant:
            continue
        # A tied weight is used in several places. The module that runs there tells which of its
        # names is meant; if none runs, the target counts as the later place.
        phases = watch.ran.get(name.rpartition(".")[0]) or watch.phases.get(name, {-1})
        phase = max(phases) if name in tied else min(phases)
        owner[name] = -1 if phase < 0 else behind if phase > 2 * last else phase // 2
    return owner


def _shared(blocks: str, watch: _Watch) -> dict[str, tuple[int, ...]]:
    """See `ModelStructure.shared`."""
    shared = {}
    for name, phases in watch.phases.items():
        users = {phase // 2 for phase in phases}
        if name.startswith(f"{blocks}."):
            # Some models rescale their blocks' weights up front; that does not share them.
            users.discard(-1)
        if len(users) > 1:
            shared[name] = tuple(sorted(users))
    return shared


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """{target: source} of the weights that the model ties."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _loss_counts_items(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> bool:
    """See `ModelStructure.loss_counts_items`. False where the model's own loss does not run, such
    as a loss over the tokens after an image."""
    items = (inputs["labels"][:, 1:] != -100).sum()
    with torch.no_grad():
        losses = []
        for factor in (1, 2, 4):
            try:
                output = model(**inputs, num_items_in_batch=items * factor, use_cache=False)
            except (TypeError, ValueError):
                return False
            losses.append(output.loss)
    # Terms that do not depend on the number cancel in the differences.
    first, second = losses[0] - losses[1], losses[1] - losses[2]
    return bool(first > 0 and torch.isclose(first, 2 * second, rtol=1e-4))


def layer_kinds(config: PretrainedConfig) -> list[int]:
    """For each layer, the first layer of its kind. Layers of a kind have equal modules, shapes and
    types of weights, and layer types (if the configuration lists them); in a model of a family also
    equal inputs. Loads nothing. Raises ArchitectureError."""
    blocks = meta_model(config).get_submodule(introspect(config).blocks)
    assert isinstance(blocks, nn.ModuleList)
    listed = [
        value
        for name, value in config.get_text_config().to_dict().items()
        if _PER_LAYER.match(name) and isinstance(value, list) and len(value) == len(blocks)
    ]
    if (family := family_of(config)) is not None:
        listed.append([family.entering(config, k, 1) for k in range(len(blocks))])
    first: dict[tuple[object, ...], int] = {}
    kinds = []
    for index, block in enumerate(blocks):
        shapes = tuple((name, p.shape, p.dtype) for name, p in block.named_parameters())
        modules = tuple((name, type(m), m.extra_repr()) for name, m in block.named_modules())
        kind = (modules, shapes, *(str(values[index]) for values in listed))
        kinds.append(first.setdefault(kind, index))
    return kinds
