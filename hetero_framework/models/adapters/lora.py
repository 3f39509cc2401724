"""LoRA and QLoRA adapters, with the same tensors under any cut.

PEFT itself says, on the whole model on torch's meta device, which modules it would wrap and which
tensors the adapter file holds. A shard gets its part of that plan, injected in place. Parameter
names are the whole PEFT model's without `base_model.model.`; initial values are PEFT's own, drawn
on the CPU after seeding with (training seed, module name).

Number types are those of PEFT (adapter weights in float32 over a bf16 or fp16 base) and TRL's
SFTTrainer 1.16 (over a 4-bit or 8-bit base, all that is trained is bf16 except DoRA's magnitudes),
unless `autocast_adapter_dtype` says otherwise.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework import repository
from hetero_framework.config import AdapterConfig
from hetero_framework.config.expressions import expression
from hetero_framework.config.problems import Problem, problems_of, report
from hetero_framework.config.schema import REWRITES_QUANTISED, REWRITING_INITS
from hetero_framework.errors import CheckpointError, ConfigError
from hetero_framework.models.adapters.adapter_plan import (
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    PEFT_TASKS,
    AdapterPlan,
    AttachedAdapter,
)
from hetero_framework.models.cut.introspect import tied_names
from hetero_framework.models.cut.language import all_towers, lies_in, meta_model, towers
from hetero_framework.models.cut.tiny import task_of
from hetero_framework.models.files.quantization import stored_quantization
from hetero_framework.models.library import ONE_AT_A_TIME, compiled_at_first_call
from hetero_framework.models.rng import derive_seed, seed_cpu

with compiled_at_first_call():
    from peft import LoraConfig, get_peft_model_state_dict
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import cast_adapter_dtype
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.constants import DUMMY_TARGET_MODULES

if TYPE_CHECKING:
    from hetero_framework.models.cut.shard import Shard

ADAPTER_NAME = "default"

_LORA_FIELDS = frozenset(LoraConfig.__dataclass_fields__)

# Settings that say where an adapter comes from or how it starts, not how it is built.
_NOT_STRUCTURE = frozenset(
    ("task_type", "peft_version", "base_model_name_or_path", "revision")
    + ("inference_mode", "auto_mapping", "init_lora_weights")
)

_ANY_LAYERS = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
"""How PEFT finds the number of a layer where no layers_pattern says its name."""

_planned: dict[tuple[str, str], AdapterPlan] = {}


def plan_adapter(
    model_config: PretrainedConfig, adapter: AdapterConfig, base_dir: Path | None = None
) -> AdapterPlan:
    """Resolve `adapter` against the whole model, without its weights.

    Raises ConfigError when a target matches nothing, a setting contradicts the adapter to start
    from, that adapter's file lacks or adds tensors, or the initialisation is not local to a layer.
    """
    if adapter.init_from is None:
        key = (model_config.to_json_string(), adapter.model_dump_json())
        if key not in _planned:
            _planned[key] = _plan(model_config, _lora_config(adapter, model_config), None)
        plan = _planned[key]
    else:
        folder = Path(base_dir or "", os.path.expanduser(adapter.init_from))
        folder = Path(os.path.normpath(folder))
        plan = _plan(model_config, *_saved_config(folder, adapter))
    return replace(plan, autocast_adapter_dtype=adapter.autocast_adapter_dtype)


def plan_saved_adapter(model_config: PretrainedConfig, folder: Path) -> AdapterPlan:
    """The plan of an existing PEFT adapter directory. Raises as `plan_adapter`."""
    return _plan(model_config, *_saved_config(folder, None))


def reaches_towers(model_config: PretrainedConfig, folder: Path) -> bool:
    """Whether an adapter directory holds tensors of the model's towers."""
    gone, weights = all_towers(model_config), folder / ADAPTER_WEIGHTS
    if not (gone and weights.is_file()):
        return False
    with _open(weights) as file:
        return any(lies_in(k.removeprefix(PEFT_PREFIX), gone) for k in file.keys())  # noqa: SIM118


def explicit_settings(adapter: AdapterConfig, plan: AdapterPlan) -> AdapterConfig:
    """`adapter` with the settings of `init_from` written out, for machines without that file."""
    if plan.weights is None:
        return adapter
    saved = plan.lora_config
    values = {n: getattr(saved, n) for n in type(adapter).model_fields if n in _LORA_FIELDS}
    raw = {k: sorted(v) if isinstance(v, (set, frozenset)) else v for k, v in values.items()}
    if not plan.rewrites_base:
        raw["init_lora_weights"] = True  # the saved weights replace these
    raw["autocast_adapter_dtype"] = adapter.autocast_adapter_dtype
    return type(adapter).model_validate_json(json.dumps(raw))


def saved_tensors(plan: AdapterPlan, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The wanted tensors of the plan's file, by their keys in it."""
    assert plan.weights is not None
    with _open(plan.weights) as file:
        return {key: file.get_tensor(key) for key in file.keys() if wanted(key)}  # noqa: SIM118


def load_adapter_tensors(shard: Shard, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Copy the adapter file's tensors that belong to the shard into it. Returns their keys."""
    held = adapter_tensors(shard)
    keys = held.keys() & tensors.keys()
    with torch.no_grad():
        for key in keys:
            held[key].copy_(tensors[key])
    return keys


def check_adapter_complete(shard: Shard, loaded: set[str]) -> None:
    """Raise CheckpointError unless every tensor of the shard's adapter is among `loaded`."""
    assert shard.adapter is not None
    missing = adapter_tensors(shard).keys() - loaded - shard.adapter.plan.embedding_tensors
    if missing:
        shown = ", ".join(sorted(missing)[:5])
        raise CheckpointError(f"the adapter lacks {len(missing)} tensors of this stage: {shown}")


def attach_plan(shard: Shard, plan: AdapterPlan, seed: int) -> None:
    """Give `shard` its part of a planned adapter, in place, with the plan's or new weights."""
    autocast = plan.autocast_adapter_dtype
    config = _local_config(plan, shard.model)
    tuner = _inject(shard.model, config, seed, autocast=autocast is not False)
    shard.adapter = AttachedAdapter(plan, tuner)
    if plan.weights is not None:
        held = adapter_tensors(shard)
        load_adapter_tensors(shard, saved_tensors(plan, held.__contains__))
    if shard.is_quantized and autocast is not True:
        for name, parameter in shard.model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)


def meta_adapted(model_config: PretrainedConfig, plan: AdapterPlan) -> PreTrainedModel:
    """The whole language model with its adapter, on torch's meta device."""
    model = meta_model(model_config)
    _inject(model, copy.deepcopy(plan.lora_config), seed=0)
    return model


def tensors_of_plan(
    model_config: PretrainedConfig, plan: AdapterPlan, trained: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The adapter file's tensors, from all trained tensors by parameter name. The plan must have no
    `embedding_tensors`: tensors of the base are not known here."""
    model = meta_adapted(model_config, plan)
    for name, tensor in trained.items():
        module, _, parameter = name.rpartition(".")
        setattr(model.get_submodule(module), parameter, nn.Parameter(tensor))
    return {key: tensor.detach() for key, tensor in _file_tensors(model, frozenset()).items()}


def adapter_tensors(shard: Shard) -> dict[str, torch.Tensor]:
    """This shard's part of the adapter file, by PEFT's keys. The tensors alias the parameters."""
    assert shard.adapter is not None
    return _file_tensors(shard.model, shard.adapter.plan.embedding_tensors)


def _lora_config(adapter: AdapterConfig, model: PretrainedConfig) -> LoraConfig:
    """PEFT's form of the settings. As in PEFT, a classifier's head is trained and saved whole."""
    settings: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in adapter.model_dump(include=set(_LORA_FIELDS)).items()
    }
    settings["lora_alpha"] = _integer(adapter.lora_alpha)
    settings["alpha_pattern"] = {k: _integer(v) for k, v in adapter.alpha_pattern.items()}
    task = task_of(model)
    if task != "causal-lm":
        whole = meta_model(model)
        heads = [n for n, m in whole.named_children() if any(True for _ in m.parameters())]
        # PEFT always adds these two names, for the heads of all its classes.
        asked = set(settings["modules_to_save"] or ()) - {"classifier", "score"}
        saved = [*sorted(asked), *heads]
        kept = [name for name in dict.fromkeys(saved) if name != whole.base_model_prefix]
        settings["modules_to_save"] = kept or None
    try:
        config = LoraConfig(task_type=PEFT_TASKS[task], **settings)
    except ValueError as error:
        raise ConfigError(
            f"adapter: {error}", hint="change one of these settings: they contradict each other"
        ) from error
    _check_supported(config)
    return config


def _integer(value: float) -> float:
    """A number as PEFT's users write it: 16 for 16.0."""
    return int(value) if float(value).is_integer() else value


def _check_supported(config: LoraConfig) -> None:
    init = config.init_lora_weights
    if init in REWRITING_INITS and config.target_parameters:
        raise _decomposes_no_parameters(init)
    plain = LoraConfig()
    for name in sorted(_LORA_FIELDS - AdapterConfig.model_fields.keys() - _NOT_STRUCTURE):
        if _comparable(getattr(config, name)) != _comparable(getattr(plain, name)):
            raise ConfigError(f"the adapter uses {name}, which is not supported here")


def _decomposes_no_parameters(init: object) -> ConfigError:
    return ConfigError(
        f"adapter.init_lora_weights={init!r} is not supported with target_parameters: PEFT"
        " decomposes the weights of modules only",
        hint='use true, or name modules in "adapter.target_modules" ("all-linear" also means'
        " experts that are parameters)",
    )


def _saved_config(folder: Path, adapter: AdapterConfig | None) -> tuple[LoraConfig, Path]:
    """The settings and the weight file of an adapter directory. Explicit settings in `adapter` must
    agree with them, except lora_dropout, which belongs to the training."""
    weights = folder / ADAPTER_WEIGHTS
    for path in (folder / repository.ADAPTER, weights):
        if not path.is_file():
            raise ConfigError(
                f"no adapter in {folder}: {path.name} is missing",
                hint="give a directory that PEFT's save_pretrained wrote with safetensors;"
                " `hetero export` makes one of a checkpoint",
            )
    raw = repository.read_json(path := folder / repository.ADAPTER, ConfigError)
    hint = "take that entry out of the file, or another adapter"
    repository.refuse_code_in(raw, str(path), ConfigError, hint)
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{folder} holds a {raw.get('peft_type')} adapter; only LoRA is read")
    known = {k: v for k, v in raw.items() if k in AdapterConfig.model_fields and v is not None}
    try:
        AdapterConfig.model_validate_json(json.dumps(known))
    except ValidationError as error:
        problems = problems_of(error.errors(include_url=False), AdapterConfig, known)
        raise ConfigError(report(str(path), problems)) from error
    saved = LoraConfig.from_pretrained(str(folder))
    saved.inference_mode = False
    _check_supported(saved)
    if adapter is not None:
        explicit = _explicit_settings(adapter)
        for name in sorted((explicit & _LORA_FIELDS) - {"lora_dropout"}):
            wanted, there = getattr(adapter, name), getattr(saved, name)
            if _comparable(wanted) != _comparable(there):
                raise ConfigError(
                    f"adapter.{name} is {wanted!r}, but the adapter in {folder} has {there!r}",
                    hint=f"remove adapter.{name}; adapter.init_from brings it along",
                )
        if "lora_dropout" in explicit:
            saved.lora_dropout = adapter.lora_dropout
    return saved, weights


def _explicit_settings(adapter: AdapterConfig) -> set[str]:
    """The settings that the user wrote. Defaults, which the wire carries too, do not count."""
    fields = type(adapter).model_fields
    written = set(adapter.model_fields_set)
    if written != set(fields):
        return written
    default = type(adapter)()
    return {name for name in fields if getattr(adapter, name) != getattr(default, name)}


def _comparable(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return sorted(str(item) for item in value)
    return value or None


def _plan(model_config: PretrainedConfig, asked: LoraConfig, weights: Path | None) -> AdapterPlan:
    config = copy.deepcopy(asked)  # PEFT changes it
    bare, model = meta_model(model_config), meta_model(model_config)
    try:
        tuner = _inject(model, config, seed=0)
    except ValueError as error:
        raise ConfigError(f"adapter: {error}", hint=_refusal_hint(bare, str(error))) from error
    except AttributeError as error:  # PEFT looked for the weight of a module
        if config.init_lora_weights not in REWRITING_INITS:
            raise
        raise _decomposes_no_parameters(config.init_lora_weights) from error
    if config.init_lora_weights in REWRITING_INITS:
        _check_rewriting(model_config, model, tuner)
    idle = _without_effect(asked, config, tuner, bare)
    if idle and weights is None:
        where = "" if len(idle) == 1 else "the adapter"
        raise ConfigError(report(where, idle), hint=_module_hint(bare))
    remarks = [str(problem) for problem in (*idle, *_harmless(asked, bare))]
    layers: list[Any] = [model.get_submodule(name) for name in tuner.targeted_module_names]
    unmergeable = config.lora_bias * sum(
        getattr(layer.get_base_layer(), "bias", None) is None for layer in layers
    )
    if unmergeable:
        text = f"{unmergeable} of the layers have no bias, and merging has nowhere to put theirs"
        remarks.append(f"adapter.lora_bias: {text}")

    plain = _file_tensors(model, frozenset())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save_embedding_layers.*")
        full = get_peft_model_state_dict(model, model.state_dict(), ADAPTER_NAME)
    embeddings = {PEFT_PREFIX + key: t for key, t in full.items() if PEFT_PREFIX + key not in plain}
    saved = [n for n, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    plan = AdapterPlan(
        lora_config=config,
        modules=tuple(tuner.targeted_module_names),
        parameters=tuple(getattr(tuner, "targeted_parameter_names", ())),
        saved_modules=tuple(saved),
        trainable={n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad},
        tensors={key: tuple(t.shape) for key, t in {**plain, **embeddings}.items()},
        embedding_tensors=frozenset(embeddings),
        weights=weights,
        towers=towers(model_config),
        sees=bool(all_towers(model_config)),
        unmergeable=unmergeable,
        remarks=tuple(remarks),
        task=task_of(model_config),
    )
    if weights is not None:
        _check_file(weights, plan, bare)
    return plan


def _embeddings(model: PreTrainedModel) -> dict[str, int]:
    """Numbers of rows of embedding and head, by the keys of their weights in a file."""
    ends: list[Any] = []
    for end in (model.get_input_embeddings, model.get_output_embeddings):
        with suppress(NotImplementedError):
            ends.append(end())
    return {
        f"{PEFT_PREFIX}{name}{inner}.weight": len(module.weight)
        for name, module in model.named_modules()
        for inner in ("", ".base_layer")
        if any(module is end for end in ends) and hasattr(module, "weight")
    }


def _check_rewriting(config: PretrainedConfig, model: Any, tuner: LoraModel) -> None:
    """Raise ConfigError where the base's weights are quantised, tied to another weight, or stored
    as (in, out) for an initialisation that takes (out, in)."""
    setting = "adapter.init_lora_weights"
    if stored_quantization(config) is not None:
        raise ConfigError(f"{setting}: {REWRITES_QUANTISED}", hint='set it to true or "orthogonal"')
    for name in tuner.targeted_module_names:
        layer: Any = model.get_submodule(name)
        if ADAPTER_NAME not in layer.lora_A:  # an embedding's update starts as usual
            continue
        if layer.lora_A[ADAPTER_NAME].weight.shape[1] != layer.in_features:
            raise ConfigError(
                f"{setting}: of PEFT's it does not fit {name}, which stores its weight (in, out)",
                hint='use "pissa"',
            )
    ends = {name.rpartition(".")[0] for pair in tied_names(model).items() for name in pair}
    if both := sorted(ends & set(tuner.targeted_module_names)):
        raise ConfigError(
            f"{setting}: it would rewrite embedding and head, which are one weight ({both[0]})",
            hint='take them out of "adapter.target_modules"',
        )


def _without_effect(
    asked: LoraConfig, made: LoraConfig, tuner: _SeededLora, bare: nn.Module
) -> list[Problem]:
    """The entries of settings that match nothing in the `bare` model. `asked` is the configuration
    as written, `made` PEFT's version."""
    names = [name for name, _ in bare.named_modules() if name]
    parameters = [name for name, _ in bare.named_parameters()]
    written = () if isinstance(asked.target_modules, str) else asked.target_modules or ()
    # PEFT turns names of modules that newer classes keep as one parameter into target_parameters.
    targets = set(written) & set(made.target_modules or ())
    listed: list[tuple[str, Iterable[str], Iterable[str], str]] = [
        ("target_modules", sorted(targets), names, "no module of the model is called"),
        ("modules_to_save", asked.modules_to_save or (), names, "no module of the model is called"),
        ("target_parameters", asked.target_parameters or (), parameters, "no parameter is called"),
    ]
    problems = [
        Problem(f"adapter.{setting}", f"{text} {entry!r}{_near(entry, known)}")
        for setting, entries, known, text in listed
        for entry in entries
        if not any(name == entry or name.endswith(f".{entry}") for name in known)
    ]
    for setting in ("rank_pattern", "alpha_pattern"):
        problems += _idle_patterns(setting, list(getattr(asked, setting)), tuner.asked_for)
    return problems + _idle_layers(asked, tuner.asked_for, names)


def _idle_patterns(setting: str, keys: list[str], modules: list[str]) -> list[Problem]:
    """Keys of a pattern setting without effect: PEFT takes the first key that matches a module."""
    matching = {key: set(filter(expression(setting, key).match, modules)) for key in keys}
    problems, taken = [], set[str]()
    for number, key in enumerate(keys):
        if not matching[key]:
            text = f"{key!r} matches no module that gets an update{_near(key, modules)}"
            problems.append(Problem(f"adapter.{setting}", text))
        elif not matching[key] - taken:
            first = next(k for k in keys[:number] if matching[k] & matching[key])
            text = f"{key!r} comes after {first!r}, which matches the same modules; put it before"
            problems.append(Problem(f"adapter.{setting}", text))
        taken |= matching[key]
    return problems


def _idle_layers(config: LoraConfig, targeted: list[str], names: list[str]) -> list[Problem]:
    """Layers, and names of their lists, in which nothing gets an update."""
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return []
    patterns = config.layers_pattern or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    finders = [expression("layers_pattern", text) for text in patterns] or [_ANY_LAYERS]
    problems = [
        Problem("adapter.layers_pattern", f"no layers of the model are called {text!r}")
        for text, finder in zip(patterns, finders, strict=False)
        if not any(map(finder.match, names))
    ]

    def numbers(names: list[str]) -> set[int]:
        matches = (finder.match(name) for name in names for finder in finders)
        return {int(match["idx"]) for match in matches if match is not None}

    there, wanted = numbers(names), [layers] if isinstance(layers, int) else layers
    known = f"; the model has {min(there)} to {max(there)}" if there else ""
    return problems + [
        Problem("adapter.layers_to_transform", f"nothing in layer {layer} gets an update{known}")
        for layer in wanted
        if layer not in numbers(targeted)
    ]


def _harmless(config: LoraConfig, bare: nn.Module) -> list[Problem]:
    """Harmless settings that may not do what was meant: entries of exclude_modules that match no
    module, and layers_to_transform with target_parameters."""
    asked, names = config.exclude_modules or (), [name for name, _ in bare.named_modules() if name]
    if isinstance(asked, str):
        matched = any(map(expression("exclude_modules", asked).fullmatch, names))
        idle = [] if matched else [asked]
    else:
        idle = [e for e in sorted(asked) if not any(n == e or n.endswith(f".{e}") for n in names)]
    problems = [
        Problem("adapter.exclude_modules", f"no module of the model matches {e!r}{_near(e, names)}")
        for e in idle
    ]
    if config.layers_to_transform and config.target_parameters:
        text = "it does not hold for target_parameters, which get an update in every layer (PEFT)"
        problems.append(Problem("adapter.layers_to_transform", text))
    return problems


def _near(entry: str, names: Iterable[str]) -> str:
    """A question that suggests names like the last part of an entry; empty without such names."""
    leaves = sorted({leaf for name in names if not (leaf := name.rpartition(".")[2]).isdigit()})
    last = re.split(r"[.\\]", entry.strip("$^*"))[-1]
    near = difflib.get_close_matches(last, leaves, n=3)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def _refusal_hint(model: nn.Module, refusal: str) -> str:
    """The hint for settings that PEFT rejects for this model."""
    for setting, none in (("lora_dropout", "0"), ("use_dora", "false")):
        if setting in refusal:
            return (
                f'set "adapter.{setting}": {none} (experts whose weights are one parameter take'
                ' none), or name the attention projections alone in "adapter.target_modules"'
            )
    if "Mamba" in refusal:
        return (
            'set "adapter.exclude_modules": ["out_proj", "conv1d"] (the state-space layers use '
            "these weights without calling the module)"
        )
    return _module_hint(model)


def _module_hint(model: nn.Module) -> str:
    leaves = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() > 1
    }
    return "modules that can be named: " + ", ".join(sorted(leaves))


def _check_file(weights: Path, plan: AdapterPlan, bare: PreTrainedModel) -> None:
    """Compare an adapter file's header with the plan; reads no tensor. `bare` is the model without
    its adapter."""
    parameters, rows = [name for name, _ in bare.named_parameters()], _embeddings(bare)
    with _open(weights) as file:
        sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    own = sorted(k for k in rows.keys() & sizes.keys() if sizes[k] != plan.tensors.get(k))
    if own:
        raise ConfigError(
            f"{weights} has embeddings of its own, as PEFT saves them of a resized vocabulary or"
            f" with save_embedding_layers: {', '.join(own)} with {sizes[own[0]][0]} rows, the"
            f" model's {rows[own[0]]}",
            hint="put them into the model once, with PEFT's unload(), as docs/models.md shows",
        )
    kinds: dict[str, list[str]] = {}
    for key in sorted(set(plan.tensors) - plan.embedding_tensors - set(sizes)):
        kinds.setdefault("are missing", []).append(key)
    for key in sorted(set(sizes) - set(plan.tensors)):
        kinds.setdefault(_kind(key, parameters, plan.towers), []).append(key)
    if kinds:
        problems = "; ".join(
            f"{len(keys)} tensors {what}: {', '.join(keys[:4])}{', ...' if keys[4:] else ''}"
            for what, keys in kinds.items()
        )
        hint = "adapter.init_from must be an adapter of this very model"
        raise ConfigError(f"{weights} does not fit the model: {problems}", hint=hint)
    for key, shape in sizes.items():
        if shape != (needed := plan.tensors[key]):
            raise ConfigError(f"{weights}: {key} has shape {shape}, the model needs {needed}")


def _kind(key: str, parameters: list[str], gone: tuple[str, ...]) -> str:
    """Words for the kind of a tensor that the adapter's settings do not ask for."""
    if lies_in(key.removeprefix(PEFT_PREFIX), gone):
        return 'are of modules that see, which only a run with "model.train_towers": true reads'
    if key.removeprefix(PEFT_PREFIX).replace(".base_layer", "") in parameters:
        return "are the model's own, which neither modules_to_save nor bias names"
    for end, setting in (("lora_B.bias", "lora_bias"), ("lora_magnitude_vector", "use_dora")):
        if key.endswith(end):
            return f"are of an adapter whose {setting} is true, and its settings say false"
    return "belong to no layer"


def _open(weights: Path) -> Any:
    try:
        return safe_open(str(weights), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{weights} cannot be read: {error}") from error


class _SeededLora(LoraModel):
    """PEFT's LoRA; each module is created after seeding with its name."""

    def __init__(self, model: nn.Module, config: LoraConfig, seed: int) -> None:
        # Set before nn.Module.__init__ has run, when only plain values are allowed.
        self._training_seed = seed
        self.asked_for: list[str] = []  # the names that PEFT looks up in rank_pattern
        super().__init__(model, {ADAPTER_NAME: config}, ADAPTER_NAME)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.asked_for.append(kwargs["current_key"])
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            seed_cpu(derive_seed("adapter", self._training_seed, kwargs["current_key"]))
            super()._create_and_replace(*args, **kwargs)


def _inject(
    model: nn.Module, config: LoraConfig, seed: int, *, autocast: bool = True
) -> _SeededLora:
    """Wrap the targets in place and leave only the adapter trainable, as `get_peft_model` does with
    `autocast_adapter_dtype`."""
    with warnings.catch_warnings():
        # PEFT corrects these itself, or warns because a shard is not the whole model.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        warnings.filterwarnings("ignore", message="target_parameters=.* were set but no parameter")
        warnings.filterwarnings("ignore", message="You have passed exclude_modules")
        warnings.filterwarnings("ignore", message="`lora_bias=True` was passed but")
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`")
        on_meta = any(p.is_meta for p in model.parameters())
        with torch.device("meta" if on_meta else "cpu"):
            tuner = _SeededLora(model, config, seed)
    cast_adapter_dtype(model, ADAPTER_NAME, autocast_adapter_dtype=autocast)
    return tuner


def _local_config(plan: AdapterPlan, model: nn.Module) -> LoraConfig:
    """The plan's settings with every choice of modules replaced by the full names in `model`."""

    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = {name for name, _ in model.named_parameters()}

    def present(names: tuple[str, ...]) -> list[str]:
        return [n for n in names if n in modules and any(True for _ in modules[n].parameters())]

    config = copy.deepcopy(plan.lora_config)
    config.target_modules = present(plan.modules) or DUMMY_TARGET_MODULES
    if plan.parameters:
        config.target_parameters = [name for name in plan.parameters if name in parameters]
    config.modules_to_save = present(plan.saved_modules) or None
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    return config


def _file_tensors(model: nn.Module, embedding_keys: frozenset[str]) -> dict[str, torch.Tensor]:
    state = model.state_dict()  # without it PEFT takes biases of updates for damage
    peft = get_peft_model_state_dict(model, state, ADAPTER_NAME, save_embedding_layers=False)
    tensors = {PEFT_PREFIX + key: tensor for key, tensor in peft.items()}
    for key in sorted(embedding_keys):
        if (name := key.removeprefix(PEFT_PREFIX)) in state:
            tensors[key] = state[name]
    return tensors
