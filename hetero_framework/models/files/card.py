"""The card of a result (README.md), in the form of the Hugging Face hub.

It is made to be published with the result: nothing in it names a machine, an address or a place on
a disk. Models and data sets are named where they are the hub's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from huggingface_hub import (
    EvalResult,
    ModelCard,
    ModelCardData,
    metadata_load,
    try_to_load_from_cache,
)
from transformers import PretrainedConfig

from hetero_framework._version import __version__
from hetero_framework.errors import ModelError
from hetero_framework.models.cut.family import as_saved, family_of
from hetero_framework.models.cut.tiny import stock_class, task_of
from hetero_framework.models.files.export import CARD
from hetero_framework.models.files.source import ModelSource
from hetero_framework.versions import installed

TAGS = {
    "causal-lm": "text-generation",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
}
_VERSIONS = {"PEFT": "peft", "Transformers": "transformers", "Pytorch": "torch"}


def model_card(
    base: tuple[str | None, Mapping[str, str], str | None],
    config: PretrainedConfig,
    *,
    adapter: bool,
    lists: Mapping[str, Sequence[str]],
    datasets: Sequence[str] = (),
    results: Sequence[EvalResult] = (),
) -> str:
    """The text of a card. `base` is `base_facts`; `lists` are headings and what stands below each;
    `datasets` are names on the hub."""
    name, terms, form = base
    config = as_saved(config)
    shown, loader = name or "a model that is not on the hub", stock_class(config).__name__
    classifies = (task := task_of(config)) != "causal-lm"
    of_images = task == "image-classification"
    title = f"LoRA adapter for {shown}" if adapter else f"Fine-tuned from {shown}"
    load, library = None, "peft" if adapter else "transformers"
    kind = "adapter" if adapter else "finetune"
    if (family := family_of(config)) is not None:
        title, load, library = family.card(config)
    metadata = ModelCardData(
        base_model=name,
        datasets=list(datasets) or None,
        eval_results=list(results) or None,
        library_name=library,
        model_name=title if results else None,
        pipeline_tag=TAGS[task] if classifies or loader.endswith("ForCausalLM") else None,
        tags=["hetero_framework", *["lora", "transformers"] * adapter]
        + [f"base_model:{kind}:{name}"] * (name is not None),
        **terms,  # type: ignore[arg-type]
    )
    versions = [f"{name} {installed(package)}" for name, package in _VERSIONS.items()]
    if form is not None:
        made = "trained on" if adapter else "made from"
        text = f"{form}; this was {made} its weights in full precision, as {form} stands for them"
        lists = {**lists, "### Stored form of the base model": [text]}
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("card.md")),
        title=title,
        load=load,
        adapter=adapter,
        loader=loader,
        classifies=classifies,
        reader="AutoImageProcessor" if of_images else "AutoTokenizer",
        read="processor" if of_images else "tokenizer",
        lists={**lists, "### Framework versions": [f"hetero_framework {__version__}", *versions]},
    )
    return str(card)


def code(text: str) -> str:
    """A text as Markdown's code, whatever it holds."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if len(ticks) > 1 else f"`{text}`"


def is_hub_name(name: str) -> bool:
    """Whether the hub could have a repository of this name, unlike text that holds markup."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII) is not None


def base_facts(source: ModelSource) -> tuple[str | None, dict[str, str], str | None]:
    """A model's name on the hub (None for a directory), its licence by its own card, and the form
    in which its weights are stored, as far as its files are on this machine. Nothing for a model
    with random weights."""
    if source.model.name_or_path is None:
        return None, {}, None
    place, revision, form = source.place, source.model.revision, None
    is_here = Path(place).is_dir()
    cached = None if is_here else try_to_load_from_cache(place, CARD, revision=revision)
    try:
        data = metadata_load(cached if isinstance(cached, str) else Path(place, CARD)) or {}
    except (OSError, ValueError, yaml.YAMLError):  # none, or one that nobody can read
        data = {}
    terms = {key: data.get(key) for key in ("license", "license_name")}
    kept = {key: value for key, value in terms.items() if isinstance(value, str)}
    with suppress(ModelError):  # not here
        form = source.form
    return place if not is_here and is_hub_name(place) else None, kept, form
