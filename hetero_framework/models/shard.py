"""A layer range of any Hugging Face causal language model as a runnable shard.

The shard is an instance of a subclass of the model's own class, and transformers runs its own
forward in it: masks, rotary embeddings, routing and the like stay its business. Blocks outside
the range pass the hidden state through; the received hidden state is put in at the entry of the
first block that is present, and taken out at the entry of the first one that is absent again.
So whatever a model does between its parts happens exactly once, on one of the stages.

Parameter names, list positions and layer indices are those of the whole model.

Shapes: B rows of a micro-batch, S tokens, D hidden size. A hidden state may have more axes
(some models carry several streams); it crosses a boundary as it is.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.models.anatomy import (
    Anatomy,
    BlockForm,
    learn_anatomy,
    tied_names,
)
from hetero_framework.models.quantization import quantization_config, stored_quantization_config
from hetero_framework.models.quiet import quiet_library
from hetero_framework.models.tiny import causal_lm_config
from hetero_framework.models.weights import Checkpoint, read_config, resolve_model_path

if TYPE_CHECKING:
    from hetero_framework.config import ModelConfig
    from hetero_framework.core.dal import Device
    from hetero_framework.models.adapters import AttachedAdapter

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ShardRange:
    """Layers `[start, end)`; the first shard also has what comes before, the last what follows."""

    start: int
    end: int
    is_first: bool
    is_last: bool


def load_model_config(model: ModelConfig, base_dir: Path) -> PretrainedConfig:
    """The transformers configuration that the `model` section names. Raises ModelError."""
    if model.from_config is not None:
        fields = dict(model.from_config)
        try:
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        except (KeyError, ValueError, TypeError) as error:
            raise ModelError(
                f"model.from_config is no configuration of an installed architecture: {error}"
            ) from error
    else:
        source = resolve_model_path(str(model.name_or_path), base_dir)
        config = read_config(source, model.revision)
    if model.attn_implementation is not None:
        config._attn_implementation = model.attn_implementation
    return causal_lm_config(config)


def num_layers(config: PretrainedConfig) -> int:
    """The number of blocks that a shard plan must cover. Raises ArchitectureError."""
    return learn_anatomy(config).num_layers


def load_shard(
    model: ModelConfig, base_dir: Path, rng: ShardRange, device: Device, *, seed: int
) -> Shard:
    """Load the shard that `rng` names onto `device`.

    Reads only the tensors of this shard. With `model.from_config` the weights are random, drawn
    from `seed` and each module's name, so that they do not depend on the cut.
    Raises ModelError (files), ArchitectureError (a model that cannot be cut).
    """
    config = load_model_config(model, base_dir)
    dtype = None if model.dtype == "auto" else getattr(torch, model.dtype)
    if model.from_config is not None:
        return build_shard(config, None, rng, dtype=dtype, device=device.torch_device, seed=seed)
    quantization = None
    if model.quantization is not None:
        compute_dtype = dtype or _config_dtype(config)
        quantization = quantization_config(model.quantization, config, compute_dtype, device)
    if (stored := stored_quantization_config(config, device)) is not None:
        config.quantization_config, quantization = stored, None
    source = resolve_model_path(str(model.name_or_path), base_dir)
    checkpoint = Checkpoint(source, model.revision)
    return build_shard(
        config, checkpoint, rng, dtype=dtype, device=device.torch_device, quantization=quantization
    )


def build_shard(
    config: PretrainedConfig,
    checkpoint: Checkpoint | None,
    rng: ShardRange,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: Any = None,
    seed: int = 0,
) -> Shard:
    """Build a shard from a configuration and a checkpoint (None: random weights from `seed`).

    `dtype` None takes the configuration's. Raises ModelError, ArchitectureError.
    """
    anatomy = learn_anatomy(config)
    whole = Skeleton(config, anatomy)
    check_cut(config, whole, rng)
    device = torch.device(device)
    weights_dtype = dtype or _config_dtype(config)
    if checkpoint is None:
        model = _random(config, whole, rng, weights_dtype, device, seed)
    else:
        model = _load(config, whole, rng, weights_dtype, device, quantization, checkpoint)
    return Shard(model, config, whole, rng)


def _config_dtype(config: PretrainedConfig) -> torch.dtype:
    dtype = config.dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class Skeleton:
    """The whole model without its weights: names and order of everything in it."""

    def __init__(self, config: PretrainedConfig, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        with torch.device("meta"):
            model = anatomy.model_class._from_config(copy.deepcopy(config))
        blocks = model.get_submodule(anatomy.blocks)
        if len(blocks) != anatomy.num_layers:
            raise ArchitectureError(
                f"{type(model).__name__} has {len(blocks)} blocks, its tiny copy "
                f"{anatomy.num_layers}."
            )
        self.parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.names = {*self.parameters, *model.state_dict()}
        self.modules = {name: index for index, (name, _) in enumerate(model.named_modules())}
        self.tied = tied_names(model)
        self.head, self.embedding = _tied_ends(self.tied, anatomy)
        self._local: dict[str, int] = {}
        counts: dict[str, int] = {}
        for name in self.parameters:
            parent = name.rpartition(".")[0]
            self._local[name] = counts[parent] = counts.get(parent, -1) + 1

    def rank(self, name: str) -> tuple[int, ...]:
        """Where a parameter stands in the whole model: (module, place in the module).

        Parameters that an adapter adds stand behind the own ones of the deepest module of the
        whole model that their name runs through; equal ranks keep the stage's own order.
        """
        parts = name.split(".")
        for length in range(len(parts) - 1, -1, -1):
            module = ".".join(parts[:length])
            if module in self.modules:
                return self.modules[module], self._local.get(name, len(self.parameters))
        raise AssertionError("the root module has the empty name")

    def layer_of(self, name: str) -> int | None:
        """The block that a name lies in, or None outside the blocks."""
        prefix = f"{self.anatomy.blocks}."
        index = name.removeprefix(prefix).partition(".")[0]
        return int(index) if name.startswith(prefix) and index.isdigit() else None

    def holds(self, name: str, rng: ShardRange) -> bool:
        """Whether a shard has the parameter or module of this name (a head for a tied weight)."""
        layer = self.layer_of(name)
        if layer is not None:
            return rng.start <= layer < rng.end
        owner = self.anatomy.owner.get(name)
        if owner is None:
            inside = [o for n, o in self.anatomy.owner.items() if n.startswith(f"{name}.")]
            return not inside or any(self._owns(o, rng) for o in inside)
        return self._owns(owner, rng)

    def _owns(self, owner: int, rng: ShardRange) -> bool:
        if owner < 0:
            return rng.is_first
        if owner >= self.anatomy.num_layers:
            return rng.is_last
        return rng.start <= owner < rng.end


def check_cut(config: PretrainedConfig, whole: Skeleton, rng: ShardRange) -> None:
    """Refuse what would cross the boundaries of `rng` beside the hidden state.

    Raises ArchitectureError with the reason.
    """
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        raise ArchitectureError(
            "The router's auxiliary loss (output_router_logits) joins all layers in one loss.",
            hint="Set output_router_logits to false in the model's configuration.",
        )
    for name in ("layerdrop", "layer_dropout"):
        if getattr(text, name, 0.0):
            raise ArchitectureError(
                f"{name} = {getattr(text, name)} skips layers at random, over all stages.",
                hint=f"Set {name} to 0 in the model's configuration.",
            )
    if rng.is_first and rng.is_last:
        return
    anatomy = whole.anatomy
    for layer, crossing in sorted(anatomy.crossing.items()):
        raise ArchitectureError(
            f"Layer {layer} receives, beside the hidden state, {', '.join(crossing)}, from"
            " outside it."
        )
    ends = {whole.head, whole.embedding, *whole.tied, *whole.tied.values()}
    for name, layers in sorted(anatomy.shared.items()):
        inside = [rng.start <= layer < rng.end for layer in layers]
        if name not in ends and any(inside) and not all(inside):
            raise ArchitectureError(
                f"{name} is shared by layers {list(layers)} of different stages."
            )


def _tied_ends(tied: dict[str, str], anatomy: Anatomy) -> tuple[str | None, str | None]:
    """(head, embedding) when one weight is used at both ends of the model."""
    for target, source in tied.items():
        owners = anatomy.owner.get(target), anatomy.owner.get(source)
        if owners == (anatomy.num_layers, -1):
            return target, source
    return None, None


class _Captured(Exception):
    """Ends a forward once the hidden state has left the last block of a shard."""


class PassThrough(nn.Module):
    """Stands for an absent block: returns the hidden state it is given.

    Models read attributes of their blocks (`attention_type`, `mamba.mup_vector`, ...): plain ones
    and the shapes of tensors stay, without memory. Methods that a model calls on all its blocks
    do nothing here.
    """

    def __init__(self, block: nn.Module, form: BlockForm) -> None:
        super().__init__()
        self._form = form
        self._block_class = type(block)
        # Set by the shard: what to do with the hidden state on its way through.
        self.on_hidden: Callable[[torch.Tensor], torch.Tensor] | None = None
        _copy_outline(block, self)

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(self.__dict__.get("_block_class"), name, None)):
            return lambda *args, **kwargs: None
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_BSD = self._form.hidden(args, kwargs)
        if self.on_hidden is not None:
            hidden_BSD = self.on_hidden(hidden_BSD)
        return self._form.wrap(hidden_BSD)


class AbsentLinear(nn.Module):
    """Stands for an absent projection before the blocks; its output is not used."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.out_features: int
        _copy_plain_attributes(linear, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


class AfterBlocks(nn.Module):
    """Stands for an absent module after the blocks: reaching it ends the forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _copy_plain_attributes(module, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Captured


def _copy_plain_attributes(source: nn.Module, target: Any) -> None:
    for name, value in vars(source).items():
        if isinstance(value, (str, int, float, bool)) and not hasattr(target, name):
            setattr(target, name, value)


def _copy_outline(source: nn.Module, target: Any) -> None:
    """Plain attributes and tensors' shapes of a module and of the modules in it."""
    _copy_plain_attributes(source, target)
    tensors = [*source.named_parameters(recurse=False), *source.named_buffers(recurse=False)]
    for name, tensor in tensors:
        setattr(target, name, tensor.detach().to("meta"))
    for name, child in source.named_children():
        setattr(target, name, _outline(child))


def _outline(module: nn.Module) -> Any:
    if isinstance(module, nn.ModuleList):
        return [_outline(child) for child in module]
    if isinstance(module, nn.ModuleDict):
        return {name: _outline(child) for name, child in module.items()}
    outline = SimpleNamespace()
    _copy_outline(module, outline)
    return outline


def shard_class(
    whole: Skeleton, rng: ShardRange, *, keep_embedding: bool = False
) -> type[PreTrainedModel]:
    """The model's own class with everything outside `rng` taken out after construction.

    `keep_embedding` leaves the embedding in a shard that has only the head, while a tied head
    is loaded from it.
    """
    base = whole.anatomy.model_class

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        _prune(self, whole, rng, keep_embedding)

    body = {
        "__init__": __init__,
        # The library tells its own models from others by module and name.
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (base,), body)


def _prune(model: Any, whole: Skeleton, rng: ShardRange, keep_embedding: bool) -> None:
    anatomy = whole.anatomy
    blocks = model.get_submodule(anatomy.blocks)
    for index, form in enumerate(anatomy.forms):
        if not rng.start <= index < rng.end:
            blocks[index] = PassThrough(blocks[index], form)
    absent: dict[str, list[str]] = {}
    for name in anatomy.owner:
        if not (whole.holds(name, rng) or (keep_embedding and name == whole.embedding)):
            path, _, attribute = name.rpartition(".")
            absent.setdefault(path, []).append(attribute)
    model._hetero_stubs = []
    for path, attributes in absent.items():
        owner = anatomy.owner[f"{path}.{attributes[0]}".lstrip(".")]
        _take_out(model, path, attributes, after=owner >= anatomy.num_layers)
    _restrict_tying(model, whole, rng, keep_embedding)
    # What other stages hold is no news.
    model._keys_to_ignore_on_load_unexpected = {".*"}


def _take_out(model: Any, path: str, attributes: list[str], *, after: bool) -> None:
    """Remove parameters of the module at `path`; stubs take their place (`_fill_stubs`)."""
    module = model.get_submodule(path)
    weights = {name: module._parameters.pop(name) for name in attributes}
    leaf = path and not any(True for _ in module.children())
    emptied = not any(p is not None for p in module._parameters.values())
    if leaf and emptied and (after or isinstance(module, nn.Linear)):
        parent_path, _, child = path.rpartition(".")
        module = AfterBlocks(module) if after else AbsentLinear(module)
        setattr(model.get_submodule(parent_path), child, module)
    for name, weight in weights.items():
        setattr(module, name, weight.detach())
        model._hetero_stubs.append((module, name))


def _restrict_tying(model: Any, whole: Skeleton, rng: ShardRange, keep_embedding: bool) -> None:
    """Leave in the library's tables only ties whose both ends are here."""

    def here(name: str) -> bool:
        return whole.holds(name, rng) or (keep_embedding and name == whole.embedding)

    for prefix, submodule in model.named_modules():
        if isinstance(submodule, PreTrainedModel):
            module: Any = submodule
            dot = f"{prefix}." if prefix else ""
            module._tied_weights_keys = None
            module.all_tied_weights_keys = {
                target: source
                for target, source in (module.all_tied_weights_keys or {}).items()
                if here(dot + target) and here(dot + source)
            }


def _fill_stubs(model: Any) -> None:
    """Give absent weights that a forward may still touch a shape but no memory (zero stride)."""
    device, dtype = model.device, model.dtype
    for module, name in model._hetero_stubs:
        shape = getattr(module, name).shape
        setattr(module, name, torch.zeros((), dtype=dtype, device=device).expand(shape))
    del model._hetero_stubs


def _load(
    config: PretrainedConfig,
    whole: Skeleton,
    rng: ShardRange,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Any,
    checkpoint: Checkpoint,
) -> PreTrainedModel:
    """A shard with weights of a checkpoint, through the library's own loading."""
    keep_embedding = whole.head is not None and rng.is_last and not rng.is_first
    cls = shard_class(whole, rng, keep_embedding=keep_embedding)
    skeleton: Any
    with torch.device("meta"):
        skeleton = cls._from_config(copy.deepcopy(config), dtype=dtype)
    own = {*dict(skeleton.named_parameters(remove_duplicate=False)), *skeleton.state_dict()}
    wanted = _key_filter(skeleton, whole, own)
    quantized = quantization is not None or hasattr(config, "quantization_config")
    model: Any
    report: dict[str, Any]
    with quiet_library(), checkpoint.slices(wanted) as slices:
        model, report = cls.from_pretrained(  # type: ignore[misc]
            None,
            config=config,
            state_dict=slices,
            dtype=dtype,
            device_map={"": device} if quantized or device.type != "cpu" else None,
            quantization_config=quantization,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ModelError(
            f"The checkpoint {checkpoint.source!r} lacks {len(missing)} weights of layers"
            f" {rng.start} to {rng.end - 1}: {shown}"
        )
    model.config.name_or_path = checkpoint.source
    _fill_stubs(model)
    _untie(model, whole, rng)
    return model


def _key_filter(model: PreTrainedModel, whole: Skeleton, own: set[str]) -> Callable[[str], bool]:
    """Tells which tensors of a checkpoint this shard needs, by the library's own renaming."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    known = dict.fromkeys(whole.names, True)

    def wanted(key: str) -> bool:
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name = key
        # Quantisation keeps its statistics beside a weight, under longer names.
        while name and name not in known:
            if name in whole.modules and any(n.startswith(f"{name}.") for n in own):
                return True
            name = name.rpartition(".")[0]
        return name in own

    return wanted


def _untie(model: Any, whole: Skeleton, rng: ShardRange) -> None:
    """Make embedding and head two parameters, over one storage where both are here."""
    if whole.head is None or not rng.is_last:
        return
    assert whole.embedding is not None
    weight = model.get_parameter(whole.embedding)
    path, _, attribute = whole.head.rpartition(".")
    head = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    setattr(model.get_submodule(path), attribute, head)
    if not rng.is_first:
        path, _, attribute = whole.embedding.rpartition(".")
        model._hetero_stubs = []
        _take_out(model, path, [attribute], after=False)
        _fill_stubs(model)
    model.all_tied_weights_keys.pop(whole.head, None)


def _random(
    config: PretrainedConfig,
    whole: Skeleton,
    rng: ShardRange,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> PreTrainedModel:
    """A shard with random weights by the model's own rules, the same under every cut."""
    keep_embedding = whole.head is not None and rng.is_last and not rng.is_first
    cls = shard_class(whole, rng, keep_embedding=keep_embedding)
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(config), dtype=dtype)
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        _initialize("", model, model, seed)
    model.tie_weights(recompute_mapping=False)
    model.to(device)
    _fill_stubs(model)
    _untie(model, whole, rng)
    return model


def _initialize(name: str, module: nn.Module, owner: PreTrainedModel, seed: int) -> None:
    """Run the model's `_init_weights` over all modules, innermost first, seeded by their names."""
    inner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        _initialize(f"{name}.{child_name}" if name else child_name, child, inner, seed)
    torch.manual_seed(_derive(seed, name))
    inner._initialize_weights(module)


def _derive(*parts: str | int) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Shard:
    """A runnable layer range of a model.

    `model` is the pruned transformers model. `on_enter` is called with "embedding" when a first
    shard starts a forward, with i before block i and with "head" after the last block: the place
    to set the random state, so that it does not depend on the cut. With activation checkpointing
    a block's recompute draws the numbers of its forward again.
    """

    def __init__(
        self, model: PreTrainedModel, config: PretrainedConfig, whole: Skeleton, rng: ShardRange
    ) -> None:
        self.model: Any = model
        self.config = config
        self.range = rng
        self.on_enter: Callable[[str | int], None] | None = None
        self.adapter: AttachedAdapter | None = None
        self.embedding_name = whole.embedding
        self.head_name = whole.head
        self.tied = whole.head is not None
        self._whole = whole
        # Asked now: over a quantised base, an adapter's type would pass for the model's later.
        self._dtype = model.dtype
        self._injected: torch.Tensor | None = None
        self._captured: torch.Tensor | None = None
        self._parameters_of_forward = inspect.signature(model.forward).parameters
        self._install()

    @property
    def absent_modules(self) -> tuple[str, ...]:
        """Names of modules that other stages hold and a stand-in replaces here."""
        kinds = (PassThrough, AbsentLinear, AfterBlocks)
        return tuple(n for n, module in self.model.named_modules() if isinstance(module, kinds))

    @property
    def loss_counts_items(self) -> bool:
        """Whether the model's own loss honours `num_items_in_batch`."""
        return self._whole.anatomy.loss_counts_items

    def rank(self, name: str) -> tuple[int, ...]:
        """Position of a parameter in the whole model's order."""
        return self._whole.rank(name)

    def train(self, mode: bool = True) -> None:
        """Training mode (dropout, activation checkpointing) on or off."""
        self.model.train(mode)
        for module in self.model.modules():
            # Outside training mode bitsandbytes repacks 4-bit weights for good on some CPUs, and
            # training after an evaluation would go on with other numbers. The module itself does
            # nothing else with the mode.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.training = True

    def forward(self, inputs: Inputs, hidden_BSD: torch.Tensor | None) -> torch.Tensor:
        """Hidden state that leaves this shard; not for the last one.

        `inputs` holds input_ids (first shard only), attention_mask and optional position_ids.
        """
        with suppress(_Captured):
            self._run(inputs, hidden_BSD)
        captured, self._captured = self._captured, None
        if captured is None:
            raise AssertionError("the forward ended without a hidden state")
        return captured

    def loss(
        self, inputs: Inputs, hidden_BSD: torch.Tensor | None, num_items: torch.Tensor | None
    ) -> torch.Tensor:
        """Sum of the token losses over `inputs["labels"]` divided by `num_items` (None: mean)."""
        labels = inputs["labels"]
        if num_items is None:
            return self._run(inputs, hidden_BSD, labels=labels).loss
        if self._whole.anatomy.loss_counts_items:
            return self._run(inputs, hidden_BSD, labels=labels, num_items_in_batch=num_items).loss
        logits = self._run(inputs, hidden_BSD).logits
        return token_loss(self.model, logits, labels, num_items)

    def logits(self, inputs: Inputs, hidden_BSD: torch.Tensor | None) -> torch.Tensor:
        """Logits [B, S, vocabulary] of the last shard."""
        return self._run(inputs, hidden_BSD).logits

    def _run(self, inputs: Inputs, hidden_BSD: torch.Tensor | None, **extra: Any) -> Any:
        arguments: Inputs = {
            name: inputs[name] for name in ("attention_mask", "position_ids") if name in inputs
        }
        if self.range.is_first:
            arguments["input_ids"] = inputs["input_ids"]
            if self.on_enter is not None:
                self.on_enter("embedding")
        else:
            assert hidden_BSD is not None
            arguments.update(self._placeholder(inputs, hidden_BSD))
        self._injected = hidden_BSD
        try:
            return self.model(**arguments, use_cache=False, **extra)
        finally:
            self._injected = None

    def _placeholder(self, inputs: Inputs, hidden_BSD: torch.Tensor) -> Inputs:
        """What the model is given as its input where the embedding is elsewhere.

        Only shape and type matter: the received hidden state takes its place later.
        """
        mask = inputs.get("attention_mask")
        rows, tokens = (hidden_BSD if mask is None else mask).shape[:2]
        if "inputs_embeds" not in self._parameters_of_forward:
            zeros = torch.zeros(rows, tokens, dtype=torch.int64, device=hidden_BSD.device)
            return {"input_ids": zeros}
        width = self.model.get_input_embeddings().weight.shape[-1]
        zeros = torch.zeros(rows, tokens, width, dtype=self._dtype, device=hidden_BSD.device)
        return {"inputs_embeds": zeros}

    def _install(self) -> None:
        """Hooks that put the hidden state in, take it out and announce the places."""
        blocks: list[Any] = list(self.model.get_submodule(self._whole.anatomy.blocks).children())
        rng, last = self.range, len(blocks) - 1
        for index in range(rng.start, rng.end):
            blocks[index].register_forward_pre_hook(self._entering(index), with_kwargs=True)
        if rng.is_last:
            if rng.end == rng.start:
                blocks[last].on_hidden = lambda _: self._take_injected()
            blocks[last].register_forward_hook(self._announce_head)
        elif rng.end <= last:
            blocks[rng.end].on_hidden = self._capture_and_stop
        else:
            blocks[last].register_forward_hook(self._capture_output)

    def _entering(self, index: int) -> Callable[..., Any]:
        form = self._whole.anatomy.forms[index]

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.on_enter is not None:
                self.on_enter(index)
            if index != self.range.start or self.range.is_first:
                return None
            # Recomputing a checkpointed block comes here again, after the forward has ended; it
            # brings the tensor that stood in for the hidden state, which keeps the real one.
            stand_in: Any = form.hidden(args, kwargs)
            if self._injected is not None:
                stand_in._hetero_hidden = self._injected
            return form.replace(stand_in._hetero_hidden, args, kwargs)

        return hook

    def _take_injected(self) -> torch.Tensor:
        assert self._injected is not None
        return self._injected

    def _capture_and_stop(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        self._captured = hidden_BSD
        raise _Captured

    def _capture_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._captured = self._whole.anatomy.forms[-1].take(output)

    def _announce_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.on_enter is not None:
            self.on_enter("head")


def token_loss(
    model: PreTrainedModel, logits: torch.Tensor, labels: torch.Tensor, num_items: torch.Tensor
) -> torch.Tensor:
    """The library's causal-LM loss: sum of token losses divided by `num_items`."""
    return model.loss_function(
        logits=logits.contiguous(),
        labels=labels,
        vocab_size=logits.shape[-1],
        num_items_in_batch=num_items,
    )
