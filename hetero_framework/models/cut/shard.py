"""A layer range of any Hugging Face causal language model as a runnable shard.

A shard is an instance of a subclass of the model's own class, and transformers runs its own forward
in it: masks, rotary embeddings, routing and the like stay its business. Blocks outside the range
pass the hidden state through. The received hidden state is put in at the entry of the first present
block. The outgoing one is taken at the entry of the first absent block after it, so that whatever a
model does between its parts happens once, on one stage. Side tensors (`side.py`) go in and out at
the blocks that receive them. The last shard can also run its blocks first and then the rest on one
loss chunk at a time (`chunk_loss`).

Parameter names, list positions and layer indices are those of the whole model.

Shapes: B rows of a micro-batch, S tokens, D hidden size. A hidden state may have more axes
(some models carry several streams); it crosses a boundary as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother

from hetero_framework.config.objectives import shows_pictures
from hetero_framework.data.batches import PICTURES
from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.models.cut import partition
from hetero_framework.models.cut.attention import make_known
from hetero_framework.models.cut.codebooks import for_model
from hetero_framework.models.cut.family import family_of, head_for
from hetero_framework.models.cut.introspect import BlockForm
from hetero_framework.models.cut.known_masks import knowing, register_known_masks
from hetero_framework.models.cut.language import lies_in, set_apart, trains_towers
from hetero_framework.models.cut.partition import Captured, ShardRange, Skeleton, skeleton_of
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.side import (
    Bundle,
    Call,
    Form,
    Report,
    Way,
    as_inner,
    put_at,
    shown_form,
    tensor_at,
)
from hetero_framework.models.cut.tiny import task_of
from hetero_framework.models.files.fingerprint import Fingerprint, fingerprint
from hetero_framework.models.files.packed import contradictory
from hetero_framework.models.files.quantization import quantization_config
from hetero_framework.models.files.source import ModelSource, new_names
from hetero_framework.models.files.weights import (
    Checkpoint,
    config_dtype,
    few,
    refuse_wrapped,
    renaming,
)
from hetero_framework.models.library import ONE_AT_A_TIME, quiet_library
from hetero_framework.models.rng import derive_seed, seed_cpu

if TYPE_CHECKING:
    from hetero_framework.config import ModelConfig
    from hetero_framework.core.devices import Device
    from hetero_framework.models.adapters.adapter_plan import AttachedAdapter

Inputs = dict[str, Tensor]
Look = Callable[[Tensor, Tensor], None]
"""Called with the logits [B, S, V] that a loss is made of, and its labels [B, S]."""
# Compiled versions per kind of layer: training or not, axes of size 1, the layer's own switches.
_COMPILED_VERSIONS = 64
NOTHING = ReusableModules()
_GIVEN = ("attention_mask", "position_ids", "token_type_ids")
_Part = Literal["whole", "blocks", "head"]


def load_shard(
    model: ModelConfig,
    base_dir: Path,
    rng: ShardRange,
    device: Device,
    *,
    seed: int,
    kept: ReusableModules = NOTHING,
) -> Shard:
    """Load the shard that `rng` names onto `device`. Only its own tensors are read, except those
    that are `kept` in memory. With `model.from_config` the weights are random. Raises as
    `build_shard`, `quantization_config`."""
    source = ModelSource(model, base_dir)
    config, dtype, place = source.config, source.dtype, device.torch_device
    sees = rng.is_first and shows_pictures(model.needs.data)
    build = functools.partial(
        build_shard, config, rng=rng, dtype=dtype, device=place, seed=seed, kept=kept, sees=sees
    )
    if not source.has_checkpoint:
        return build(checkpoint=None)
    quantization = quantization_config(model.quantization, config, dtype, device)
    if isinstance(quantization, dict):
        config.quantization_config, quantization = quantization, None
    checkpoint = source.checkpoint
    shard = build(checkpoint=checkpoint, quantization=quantization)
    shard.fingerprint = {**kept.fingerprint, **fingerprint(checkpoint, checkpoint.used)}
    return shard


def build_shard(
    config: PretrainedConfig,
    checkpoint: Checkpoint | None,
    rng: ShardRange,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: Any = None,
    seed: int = 0,
    kept: ReusableModules = NOTHING,
    sees: bool = False,
) -> Shard:
    """Build a shard from a checkpoint, or (None) with random weights by the model's rules, from
    `seed` and each module's name. A classifier's head that a checkpoint lacks is random, too. On
    the device "meta" there are no weights. Modules `kept` of an earlier shard are taken as they
    are. `sees`: with the model's towers. Raises ModelError for files, and ArchitectureError."""
    make_known(config._attn_implementation)
    register_known_masks()
    device, dtype = torch.device(device), dtype or config_dtype(config)
    if (family := family_of(config)) is not None:
        made: Shard = family.build(config, rng, dtype=dtype, device=device, seed=seed)
        return made
    sees |= rng.is_first and trains_towers(config)
    with ONE_AT_A_TIME:
        whole = skeleton_of(config).for_shard(config, sees)
        partition.check_cut(config, whole, rng)
        targets = [name for name in whole.targets(rng) if not kept.has(name, whole)]
        # A target is loaded from the source that it is tied to, which is then taken out.
        sources = {whole.ties[target] for target in targets}

        def is_read(name: str) -> bool:
            return name in sources or (whole.holds(name, rng) and not kept.has(name, whole))

        cls = partition.shard_class(whole, is_read)
        with torch.device("meta"):
            model: Any = cls._from_config(copy.deepcopy(config), dtype=dtype)
        if device.type == "meta":
            model.tie_weights(recompute_mapping=False)
        elif checkpoint is None:
            _fill_at_random(model, seed)
            model.to(device)
        else:
            new = _new_weights(model, new_names(whole, model, checkpoint), seed)
            how = {"dtype": dtype, "quantization_config": quantization}
            model = _read(model, config, whole, checkpoint, device, new, how)
        kept.put_into(model, whole)
        partition.fill_absent(model)
        if targets:
            partition.untie(model, whole, rng, targets)
        return Shard(model, config, whole, rng)


def _fill_at_random(model: PreTrainedModel, seed: int) -> None:
    """Give all parameters of a model on the device "meta" the weights that its rules draw."""
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # some are zeros from their constructor, by no rule
        _initialize("", model, model, seed)
    model.tie_weights(recompute_mapping=False)


def _read(
    model: Any,
    config: PretrainedConfig,
    whole: Skeleton,
    checkpoint: Checkpoint,
    device: torch.device,
    new: dict[str, Tensor],
    how: dict[str, Any],
) -> Any:
    """A model of this class with the weights of a checkpoint, and the `new` ones that it lacks.
    `how` are settings of from_pretrained. Raises ModelError."""
    wanted, lent = _key_filter(model, whole, checkpoint)
    quantized = how["quantization_config"] is not None or hasattr(config, "quantization_config")
    with quiet_library(), checkpoint.slices(wanted, how["dtype"], device) as slices:
        made, report = type(model).from_pretrained(
            None,
            config=config,
            state_dict={lent.get(key, key): part for key, part in slices.items()} | new,
            device_map={"": device} if quantized or device.type != "cpu" else None,
            ignore_mismatched_sizes=True,  # named below
            output_loading_info=True,
            **how,
        )
    _check_read(report, config, whole, checkpoint)
    made.config.name_or_path = checkpoint.source
    _check_finite(made, checkpoint.source)
    if (name := contradictory(made)) is not None:
        raise ModelError(
            f"{name} of the model {checkpoint.source!r} is not stored as its quantization_config"
            " says of its module",
            hint="put the config.json there that belongs to these weights",
        )
    return made


def _check_read(
    report: Mapping[str, Any], config: PretrainedConfig, whole: Skeleton, checkpoint: Checkpoint
) -> None:
    """Raise ModelError where transformers' `report` names tensors that are missing or have another
    shape."""
    for name, actual, expected in sorted(report["mismatched_keys"]):
        head = head_for(task_of(config))
        raise ModelError(
            f"{name} of the checkpoint {checkpoint.source!r} has the shape {list(actual)};"
            f" its config.json says {list(expected)}",
            hint="put the config.json there that belongs to these weights"
            + (head.misfit if head is not None else ""),
        )
    if missing := sorted(report["missing_keys"]):
        refuse_wrapped(checkpoint, whole.names)
        raise ModelError(
            f"the checkpoint {checkpoint.source!r} lacks {len(missing)} weights that its"
            f" config.json asks for: {few(missing)}"
        )


def _check_finite(model: torch.nn.Module, source: str) -> None:
    """Raise ModelError for weights that are infinite or NaN: no training mends them."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.is_meta:
            continue
        # The sum takes no memory. Finite numbers may add up to too much: then each row is checked.
        if bool(torch.isfinite(weight.detach().sum(dtype=torch.float32))):
            continue
        if wrong := sum(int((~torch.isfinite(row)).sum()) for row in weight.detach()):
            raise ModelError(
                f"{name} of the model {source!r} holds {wrong} numbers that are infinite or NaN",
                hint="the file is damaged; copy or download the model again",
            )


def _key_filter(
    model: PreTrainedModel, whole: Skeleton, checkpoint: Checkpoint
) -> tuple[Callable[[str], bool], dict[str, str]]:
    """A test for the tensors of a checkpoint that this shard needs, by the library's renaming; and
    {key: source} of tensors that replace an absent source, which they are tied to."""
    names = {*dict(model.named_parameters(remove_duplicate=False)), *model.state_dict()}
    known = dict.fromkeys(whole.names, True)
    rename = renaming(model, known)
    lent: dict[str, str] = {}
    above_blocks = f"{whole.structure.blocks}."
    if whole.tied:
        keys = {rename(key): key for key in checkpoint.parts}
        for target, source in reversed(whole.tied.items()):
            if source not in keys and target in keys:
                lent = {k: s for k, s in lent.items() if s != source} | {keys[target]: source}

    def wanted(key: str) -> bool:
        name = lent.get(key) or rename(key)
        if lies_in(name, whole.towers):
            return False
        # Quantisation keeps its statistics beside a weight, under longer names. Tensors of a block
        # behind the model's own, which predicts later tokens, are not wanted.
        while name and name not in known and not above_blocks.startswith(f"{name}."):
            if name in whole.modules and any(n.startswith(f"{name}.") for n in names):
                return True
            name = name.rpartition(".")[0]
        return name in names

    return wanted, lent


def _new_weights(model: PreTrainedModel, names: list[str], seed: int) -> dict[str, Tensor]:
    """Initial values of these weights of a model on the meta device, drawn on the CPU."""
    made: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        for path in sorted({name.rpartition(".")[0] for name in names}):
            module, owner = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu"), model
            for outer, inner in model.named_modules():
                if isinstance(inner, PreTrainedModel) and path.startswith(f"{outer}."):
                    owner = inner
            seed_cpu(derive_seed(seed, path))
            owner._initialize_weights(module)
            parameters = {f"{path}.{name}": p.detach() for name, p in module.named_parameters()}
            made |= {name: parameters[name] for name in names if name in parameters}
    return made


def _initialize(name: str, module: nn.Module, owner: PreTrainedModel, seed: int) -> None:
    """Run the model's `_init_weights` over all modules, innermost first, seeded by their names."""
    inner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        _initialize(f"{name}.{child_name}" if name else child_name, child, inner, seed)
    seed_cpu(derive_seed(seed, name))
    inner._initialize_weights(module)


class Shard:
    """A runnable layer range of a model.

    `on_enter` is the place to set the random state. It is called with "embedding" when a forward
    starts (tensors that all shards make before the blocks may have dropout, as XLNet's positions)
    and again after "noise" (`add_noise`), with i before block i, also in its recomputation, and
    with "head" after the last block ("head n" for loss chunk n > 0).
    """

    def __init__(
        self, model: PreTrainedModel, config: PretrainedConfig, whole: Skeleton, rng: ShardRange
    ) -> None:
        self.model: Any = model
        self.tower_modules = set_apart(model, whole.apart)
        self.config = config
        self.range = rng
        self.on_enter: Callable[[str | int], None] | None = None
        self.adapter: AttachedAdapter | None = None
        # Of the weights that were read; empty for random weights.
        self.fingerprint: Fingerprint = {}
        # Weights tied to a weight of an earlier place, which may be on another shard.
        self.ties = {target: whole.ties[target] for target in whole.targets(rng)}
        self._whole = whole
        # Asked now: over a quantised base, an adapter's type would pass for the model's later.
        self.dtype = model.dtype
        # Whether the whole model counts as quantised, as TRL asks it: also when only weights of
        # other shards are.
        self.is_quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        structure = whole.structure
        self.entering = () if rng.is_first else structure.sides_at(rng.start)
        self._leaving_sides = () if rng.is_last else structure.sides_at(rng.end)
        self.task = task_of(config)
        # Some classifiers look for the last token of a row that is no padding.
        pools = rng.is_last and self.task != "causal-lm"
        self._reads_ids = pools or structure.reads_ids(rng.start, rng.end)
        self._injected: Bundle = ()
        self._captured: dict[int, Tensor] = {}  # by place in the bundle
        self._part: _Part = "whole"
        self._chunk = 0
        running = (k for k in structure.running if rng.start <= k < rng.end)
        self._entry = next(running, None)  # the first block here, of those that run
        self._last_running = structure.running[-1]
        self._blocks: list[Any] = list(model.get_submodule(whole.structure.blocks).children())
        self._forwards: dict[int, Callable[..., Any]] = {}
        # For `dissolve` to undo: hooks, and forwards that were not their classes'.
        self._hooks: list[RemovableHandle] = []
        self._former: dict[int, Callable[..., Any] | None] = {}
        self._recomputes = False
        self.storing: Callable[[int, Tensor], AbstractContextManager[None]] | None = None
        """Makes the context in which the input of a block that is computed again is stored."""
        self._install()

    @property
    def width(self) -> int:
        """The last size of a hidden state that crosses a boundary."""
        structure = self._whole.structure
        factor = structure.hidden_shape[-1] // structure.tiny_width
        return int(self.config.get_text_config().hidden_size) * factor

    @property
    def ids_per_token(self) -> int:
        """See `ModelStructure.ids_per_token`."""
        return self._whole.structure.ids_per_token

    def hidden_tokens(self, ids: int) -> int:
        """Tokens of a hidden state, for a micro-batch with `ids` ids per row."""
        return self._whole.structure.hidden_tokens(ids)

    def parameter_index(self, name: str) -> tuple[int, ...]:
        """Position of a parameter in the whole model's order."""
        return self._whole.parameter_index(name)

    @property
    def constants(self) -> set[str]:
        """Parameters that the model's class freezes."""
        return self._whole.constants

    @property
    def tied_elsewhere(self) -> set[str]:
        """The weights of this shard that are sources of ties with targets on other shards."""
        sources = {s for t, s in self._whole.ties.items() if t not in self.ties}
        return {name for name in sources if self._whole.holds(name, self.range)}

    def arrival_problem(self, forms: Sequence[Form], size: tuple[int, int] | None) -> str | None:
        """The problem with a bundle of these forms as the input of this shard; None if there is
        none, or if the micro-batch's `size`, rows and tokens, is not known. Only the number of side
        tensors is checked."""
        if size is None:
            return None
        rows, tokens = size
        expected = 1 + len(self.entering)
        if len(forms) != expected:
            return f"{len(forms)} tensors came, expected {expected}"
        sizes, dtype, _ = forms[0]
        there, width = self.hidden_tokens(tokens), self.width
        # XLNet has tokens before rows.
        fits = any({rows, there} == {*pair} for pair in itertools.pairwise(sizes[:-1]))
        if fits and sizes[-1] == width and dtype.is_floating_point:
            return None
        return (
            f"the hidden state is {shown_form(sizes, dtype)}, expected {rows} x {there} x {width}"
        )

    def towers(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the towers, which are not parameters of the training."""
        for name in self._whole.apart:
            path, _, own = name.rpartition(".")
            tower = getattr(self.model.get_submodule(path), own)
            state = tower.state_dict() if isinstance(tower, nn.Module) else {"": tower}
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in state.items())

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Tensors that training changes beside the weights, by name; the layers of language models
        have none."""
        return {}

    def parameters_outside_blocks(self) -> Iterator[nn.Parameter]:
        """The parameters before and after the blocks of this shard, an adapter's included."""
        for name, parameter in self.model.named_parameters():
            if self._whole.layer_of(name) is None:
                yield parameter

    def train(self, mode: bool = True) -> None:
        """Training mode (dropout, activation checkpointing) on or off."""
        self.model.train(mode)
        for tower in self.tower_modules:
            tower.train(mode)
        for module in self.model.modules():
            # Outside training mode bitsandbytes repacks 4-bit weights for good on some CPUs, and
            # training would go on with other numbers. It uses the mode for nothing else.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.training = True

    def add_noise(self, alpha: float) -> None:
        """Add NEFTune's noise to the embeddings in training, as transformers does: uniform within
        alpha / sqrt(tokens of a row x hidden size). Raises ArchitectureError where the model has no
        one embedding."""
        if not self.range.is_first:
            return
        embedding: Any = None
        with suppress(NotImplementedError):
            embedding = self.model.get_input_embeddings()
        if embedding is None or isinstance(embedding, nn.ModuleList):
            raise ArchitectureError(
                f"a {self.config.model_type} model has no one embedding to add noise to",
                hint="leave training.neftune_noise_alpha out",
            )
        embedding.neftune_noise_alpha = alpha
        self._hooks.append(embedding.register_forward_hook(weakly(self._noisy)))

    def compile_blocks(self, backend: str | None, mode: str | None) -> None:
        """Compile the forward of every block with torch.compile; hooks stay outside. Which shape
        came first, or how many versions other blocks use, must not decide what code runs: the
        result would depend on the cut."""
        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _COMPILED_VERSIONS)
        for index, forward in self._forwards.items():
            self._forwards[index] = torch.compile(
                forward, dynamic=True, backend=backend or "inductor", mode=mode
            )

    def recompute_blocks(self) -> None:
        """Store only the input of each block in training, and compute it again in its backward."""
        # Not by the library's switch, which is inside the hooks in some versions only.
        self._recomputes = True

    def accompany_blocks(
        self, around: Callable[[int, BlockForm, Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace the forward of each block that is here by `around(index, form, forward)`. The new
        forward also runs in the block's recomputation."""
        forms = self._whole.structure.forms
        self._forwards = {k: around(k, forms[k], forward) for k, forward in self._forwards.items()}

    def dissolve(self, *, is_new: bool = False) -> ReusableModules:
        """Take the shard apart for good. Returns its frozen modules as they were loaded, without
        adapter and hooks; if it `is_new`, also the blocks that it trains. Returns none for a model
        that shares or rescales weights of its blocks, or whose adapter has rewritten weights."""
        for hook in self._hooks:
            hook.remove()
        for index, former in self._former.items():
            del self._blocks[index].forward
            if former is not None:
                self._blocks[index].forward = former
        is_as_loaded = self.adapter is None or not self.adapter.plan.rewrites_base
        if self.adapter is not None:
            self.adapter.take_off(self.model)
        model, whole, rng, blocks = self.model, self._whole, self.range, self._blocks
        self.model = self.adapter = None
        self._forwards, self._former, self._blocks = {}, {}, []
        if not (whole.is_separable and is_as_loaded):
            return NOTHING
        kept = {k: blocks[k] for k in range(rng.start, rng.end) if is_new or _is_frozen(blocks[k])}
        for block in kept.values():
            for module in block.modules():
                # The model collects outputs by these hooks; the next model sets its own.
                module._forward_hooks.clear()
        return ReusableModules(
            kept, partition.outside(model, whole, rng, _is_frozen), self.fingerprint
        )

    def forward(self, inputs: Inputs, received: Bundle, cache: Any = None) -> Bundle:
        """The output of this shard's last block. `received` is empty on the first shard. `inputs`
        holds input_ids (first shard, and where blocks read them), attention_mask and optional
        position_ids. With a `cache`, a ShardCache of extras/talking, `inputs` holds the tokens that
        follow those the cache has seen."""
        if self._entry is None and not self.range.is_first:
            return received
        received = as_inner(received)
        try:
            with suppress(Captured), self._doing("blocks"):
                self._run(for_model(inputs, self.ids_per_token), received, cache)
            for place, side in enumerate(self._leaving_sides, 1):
                if side in self.entering:
                    passed = received[1 + self.entering.index(side)]
                    self._captured.setdefault(place, passed)
            bundle = [self._captured.get(place) for place in range(1 + len(self._leaving_sides))]
        finally:
            self._captured = {}
        left = tuple(tensor for tensor in bundle if tensor is not None)
        if len(left) < len(bundle):
            raise AssertionError("the forward ended without a hidden state or a side tensor")
        return left

    def next_logits(self, inputs: Inputs, received: Bundle, cache: Any) -> Tensor:
        """The logits [B, V] of the token that follows each row of `inputs`, on the last shard."""
        keeps = "logits_to_keep" in _parameters(type(self.model).forward)
        extra = {"logits_to_keep": 1} if keeps else {}
        logits_BSV: Tensor = self._run(inputs, as_inner(received), cache, **extra).logits
        return logits_BSV[:, -1]

    def chunk_loss(
        self,
        inputs: Inputs,
        hidden_BSD: Tensor,
        num_items: Tensor,
        number: int,
        smoother: LabelSmoother | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """The loss of loss chunk `number` of a micro-batch, from what `forward` of this last shard
        gave. `hidden_BSD` and the `inputs` (labels, optional position_ids) are the chunk's; the
        first label of each row is not used."""
        self._chunk = number
        with self._doing("head"):
            return self.loss(inputs, (hidden_BSD,), num_items, smoother=smoother, look=look)

    def chunk_logits(self, inputs: Inputs, hidden_BSD: Tensor, number: int) -> Tensor:
        """The logits [B, S, V] of a loss chunk; arguments as for `chunk_loss`."""
        self._chunk = number
        with self._doing("head"):
            return self.logits(inputs, (hidden_BSD,))

    def logits(self, inputs: Inputs, received: Bundle) -> Tensor:
        """The logits [B, S, V] of the last shard."""
        return self.logits_and_routing(inputs, received)[0]

    def logits_and_routing(self, inputs: Inputs, received: Bundle) -> tuple[Tensor, Tensor | None]:
        """The logits, and the term that the model adds to its loss for the routers of all layers,
        0-d; None without such a term. Raises ArchitectureError where the term is not known."""
        inputs, received = for_model(inputs, self.ids_per_token), as_inner(received)
        output = self._run(inputs, received)
        routing = self._routing(output)
        if routing is None and self._whole.structure.reports:
            raise ArchitectureError(
                f"a {self.config.model_type} model does not tell what its routers add to the loss",
                hint='set "model.router_aux_loss_coef": 0',
            )
        return output.logits, routing

    def _routing(self, output: Any) -> Tensor | None:
        """The term for the routers, from the model's output; None where it is not known."""
        text = self.config.get_text_config()
        weight = getattr(text, "router_aux_loss_coef", getattr(text, "aux_loss_coef", None))
        found = getattr(output, "aux_loss", None) if self._whole.structure.reports else None
        return None if weight is None or found is None else weight * found

    def classify(self, inputs: Inputs, received: Bundle) -> tuple[Tensor, Tensor]:
        """A classifier's own loss, the mean over all labels, and its logits: [B, labels], or
        [B, S, labels] for a classifier of tokens."""
        output = self._run(inputs, as_inner(received), labels=inputs["labels"])
        return output.loss, output.logits

    def loss(
        self,
        inputs: Inputs,
        received: Bundle,
        num_items: Tensor,
        *,
        apart: list[Tensor] | None = None,
        smoother: LabelSmoother | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """The sum of the token losses over `inputs["labels"]` divided by `num_items`. It includes
        the model's term for the routers of all layers, if there is no list `apart` that gets it.
        With a `smoother`, it is the smoother's token loss alone, as in transformers' Trainer.
        `look` only reads."""
        inputs, received = for_model(inputs, self.ids_per_token), as_inner(received)
        labels = inputs["labels"]
        structure = self._whole.structure
        own = structure.loss_counts_items and (apart is None or not structure.reports)
        is_own, extra = own and smoother is None, dict[str, Any]()
        if is_own:
            extra = {"labels": labels, "num_items_in_batch": num_items}
        output = self._run(inputs, received, **extra)
        logits = output.logits
        if look is not None:
            look(logits, labels)
        if is_own:
            of_model: Tensor = output.loss
            return of_model
        if smoother is not None:
            # accelerate gives float32 logits under autocast; transformers' own loss always does.
            smoothed: Tensor = smoother({"logits": logits.float()}, labels, True, num_items)
            return smoothed
        if apart is not None and (routing := self._routing(output)) is not None:
            apart.append(routing)
        return token_loss(self.model, logits, labels, num_items)

    def _run(self, inputs: Inputs, received: Bundle, cache: Any = None, **extra: Any) -> Any:
        """The model's forward on the result of `for_model`."""
        arguments: dict[str, Any] = {name: inputs[name] for name in _GIVEN if name in inputs}
        if self._part != "head" and self.on_enter is not None:
            self.on_enter("embedding")
        if self._part != "head" and self.range.is_first:
            arguments["input_ids"] = inputs["input_ids"]
            seen = {name: t for name, t in inputs.items() if name.startswith(PICTURES)}
            arguments |= {name.removeprefix(PICTURES): t for name, t in seen.items()}
        else:
            arguments.update(self._placeholder(inputs, received[0]))
        self._injected = received
        try:
            # A tower's mask may have the same shape.
            with knowing(None if self._whole.sees else arguments.get("attention_mask")):
                if cache is None:
                    return self.model(**arguments, use_cache=False, **extra)
                takes = _parameters(type(self.model).forward)
                name = "cache_params" if "cache_params" in takes else "past_key_values"
                arguments[name] = cache.library
                return self.model(**arguments, use_cache=True, **extra)
        finally:
            self._injected = ()
            if cache is not None:
                cache.advance(inputs["positions"])

    @contextmanager
    def _doing(self, part: _Part) -> Iterator[None]:
        """Within the context, run only the blocks, or only the part behind them."""
        self._part = part
        try:
            yield
        finally:
            self._part = "whole"

    def _placeholder(self, inputs: Inputs, hidden_BSD: Tensor) -> Inputs:
        """The model's input where another shard has the embedding. Only its shape and type matter,
        unless blocks read token ids."""
        if self._reads_ids and "input_ids" in inputs:
            return {"input_ids": inputs["input_ids"]}
        # A hidden state may have other axes in front of rows and tokens.
        known = (name for name in ("attention_mask", "position_ids", "positions") if name in inputs)
        shaped = inputs.get(next(known, ""))
        # Positions may have several axes in front of rows, a hidden state behind tokens.
        rows, tokens = hidden_BSD.shape[:2] if shaped is None else shaped.shape[-2:]
        if not self._whole.structure.takes_embeddings:
            ids = (rows * self.ids_per_token, tokens)
            return {"input_ids": torch.zeros(ids, dtype=torch.int64, device=hidden_BSD.device)}
        width = self.model.get_input_embeddings().weight.shape[-1]
        zeros = torch.zeros(rows, tokens, width, dtype=self.dtype, device=hidden_BSD.device)
        return {"inputs_embeds": zeros}

    def _install(self) -> None:
        """Install the hooks that insert the hidden state, take it out and announce each block. They
        hold the shard by weak references, so that it is freed at once when it is dropped."""
        rng, last = self.range, self._last_running
        for index in range(rng.start, rng.end):
            self._former[index] = vars(self._blocks[index]).get("forward")
            self._forwards[index] = self._blocks[index].forward
            self._blocks[index].forward = self._passing(index)
        after = self._blocks[last].register_forward_hook
        self._put_in()
        self._have_reported()
        if rng.is_last:
            if self._entry is None and self._blocks[last].on_call is None:
                self._blocks[last].on_call = weakly(self._take_injected)
            self._hooks.append(after(weakly(self._leaving)))
        elif rng.end <= last:
            self._take_out()
        else:
            self._hooks.append(after(weakly(self._capture_output)))

    def _put_in(self) -> None:
        """Have received tensors put in at the entries of this shard's blocks."""
        rng = self.range
        places: dict[int, list[tuple[int, Way]]] = {}
        if self._entry is not None and not rng.is_first:
            places[self._entry] = []
        for number, side in enumerate(self.entering, 1):
            for block, path in side.places:
                if rng.start <= block < rng.end:
                    places.setdefault(block, []).append((number, path))
                    if side.is_held:
                        break  # the model itself hands the right tensor on
        for block, paths in places.items():
            inject = weakly(self._inject, block, paths)
            hook = self._blocks[block].register_forward_pre_hook(inject, with_kwargs=True)
            self._hooks.append(hook)

    def _have_reported(self) -> None:
        """Collect the reports that this shard's blocks make to the model behind all blocks. On the
        last shard, have absent blocks give the received reports."""
        for block, reports in itertools.groupby(self._whole.structure.reports, lambda r: r.block):
            if not self.range.is_last and self.range.start <= block < self.range.end:
                # The outermost module has the last word: an adapter may be in the inner ones.
                where = {side: (r.module, path) for r in reports for path, side in r.parts}
                for side, (module, path) in where.items():
                    take = weakly(self._take_report, 1 + self._leaving_sides.index(side), path)
                    reporting = self._blocks[block].get_submodule(module)
                    self._hooks.append(reporting.register_forward_hook(take))
            elif self.range.is_last and block < self.range.start:
                self._blocks[block].let_report()
                self._blocks[block].on_call = weakly(self._report, block, list(reports))

    def _take_report(
        self, place: int, path: Way, module: nn.Module, args: Any, output: Any
    ) -> None:
        if self._part == "blocks":  # not when it is computed again
            self._captured[place] = tensor_at(output, path)

    def _report(self, block: int, reports: list[Report], hidden_BSD: Tensor, call: Call) -> Tensor:
        """Give the received reports, at the entry of an absent block before the last shard's."""
        for report in reports:
            output = copy.deepcopy(report.form)
            for path, side in report.parts:
                output = put_at(output, path, self._injected[1 + self.entering.index(side)])
            self._blocks[block].report(report.module, output)
        return self._take_injected(hidden_BSD, call) if block == self._last_running else hidden_BSD

    def _take_out(self) -> None:
        """Have outgoing tensors collected at the entries of absent blocks behind this shard's."""
        end = next(k for k in self._whole.structure.running if k >= self.range.end)
        places: dict[int, list[tuple[int, Way]]] = {end: []}
        for number, side in enumerate(self._leaving_sides, 1):
            if side not in self.entering and side.places[-1][0] < len(self._blocks):
                block, path = next(place for place in side.places if place[0] >= end)
                places.setdefault(block, []).append((number, path))
        for block, paths in places.items():
            is_last = block == max(places)
            take = weakly(self._collect, block == end, paths, is_last)
            self._blocks[block].on_call = take

    def _passing(self, index: int) -> Callable[..., Any]:
        """A block's forward, which only passes the hidden state on while the head runs alone."""
        form, forward = self._whole.structure.forms[index], self._forwards[index]
        itself = weakref.ref(self)

        def passing(*args: Any, **kwargs: Any) -> Any:
            shard = itself()
            assert shard is not None
            if shard._part == "head":
                return form.wrap(form.hidden(args, kwargs))
            enter = functools.partial(shard._enter_block, index)
            if shard._recomputes and shard._blocks[index].training and torch.is_grad_enabled():
                # on_enter seeds in the recomputation, too; not every device has a random state that
                # torch could save.
                kept = shard.on_enter is None
                hidden, storing = form.hidden(args, kwargs), shard.storing
                with storing(index, hidden) if storing is not None else nullcontext():
                    return checkpoint(
                        enter, *args, use_reentrant=False, preserve_rng_state=kept, **kwargs
                    )
            return enter(*args, **kwargs)

        # As `functools.wraps`, without a reference to the block.
        functools.update_wrapper(passing, forward)
        del passing.__wrapped__  # type: ignore[attr-defined]
        passing.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        return passing

    def _enter_block(self, index: int, *args: Any, **kwargs: Any) -> Any:
        if self.on_enter is not None:
            self.on_enter(index)
        return self._forwards[index](*args, **kwargs)

    def _inject(
        self,
        block: int,
        places: list[tuple[int, Way]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call | None:
        """Put received tensors in, at the entry of a block of this shard."""
        if self._part == "head":
            return None
        if block == self._entry:
            form = self._whole.structure.forms[block]
            if block in self._whole.structure.holders:
                _overwrite(form.hidden(args, kwargs), self._injected[0])
            else:
                args, kwargs = form.replace(self._injected[0], args, kwargs)
        call: Call = args, kwargs
        for number, path in places:
            side = self.entering[number - 1]
            if side.is_held:
                held = _overwrite(tensor_at(call, path), self._injected[number])
                if side in self._leaving_sides:
                    # Gradients of its uses here are added one by one, as in the whole model.
                    self._captured[1 + self._leaving_sides.index(side)] = held
            else:
                call = put_at(call, path, self._injected[number])
        return call

    def _take_injected(self, placeholder: Tensor, call: Call) -> Tensor:
        return self._injected[0]

    def _collect(
        self,
        is_first: bool,
        places: list[tuple[int, Way]],
        is_last: bool,
        hidden_BSD: Tensor,
        call: Call,
    ) -> Tensor:
        """Collect outgoing tensors, at the entry of an absent block behind this shard's blocks; the
        last such block ends the forward."""
        if is_first:
            self._captured[0] = hidden_BSD
        for number, path in places:
            self._captured[number] = tensor_at(call, path)
        if is_last:
            raise Captured
        return hidden_BSD

    def _capture_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._captured[0] = self._whole.structure.forms[-1].take(output)

    def _noisy(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Add noise after the embedding. Later draws are the same as on shards without noise."""
        from transformers.integrations.neftune import neftune_post_forward_hook  # brings PEFT

        if not module.training or self._part == "head":
            return output
        if self.on_enter is not None:
            self.on_enter("noise")
        noisy: Tensor = neftune_post_forward_hook(module, args, output)
        if self.on_enter is not None:
            self.on_enter("embedding")
        return noisy

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called after the last block, on the last shard."""
        form = self._whole.structure.forms[-1]
        if self._part == "blocks":
            self._captured[0] = form.take(output)
            raise Captured
        if self.on_enter is not None:
            self.on_enter(f"head {self._chunk}" if self._part == "head" and self._chunk else "head")
        return form.wrap(self._injected[0]) if self._part == "head" else None


def _overwrite(placeholder: Tensor, received: Tensor) -> Tensor:
    """Copy the received tensor into the placeholder, which the model's own variables may hold.
    Gradients lead back to the received one. Raises ArchitectureError if shape or type differ."""
    if (placeholder.shape, placeholder.dtype) != (received.shape, received.dtype):
        raise ArchitectureError(
            f"a tensor of {tuple(received.shape)}, {received.dtype}, has no place in a stage whose"
            f" own is {tuple(placeholder.shape)}, {placeholder.dtype}"
        )
    return placeholder.copy_(received)


@functools.cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of what a forward takes."""
    return frozenset(inspect.signature(forward).parameters)


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method, called with `first` in front, that does not keep its object alive. The object
    must outlive the calls."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*first, *args, **kwargs)

    return call


def put_back(tensors: dict[str, Tensor], kept: dict[str, Tensor]) -> None:
    """Give tensors the values that were `kept`."""
    for name, value in kept.items():
        # Unseen by autograd, which stores running means for a backward that does not read them.
        tensors[name].data.copy_(value)


def token_loss(model: PreTrainedModel, logits: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
    """The library's causal-LM loss: sum of token losses divided by `num_items`."""
    loss: Tensor = model.loss_function(
        logits=logits.contiguous(),
        labels=labels,
        vocab_size=logits.shape[-1],
        num_items_in_batch=num_items,
    )
    return loss
