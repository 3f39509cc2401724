"""Processors made of transformers' defaults, so that a class is tried with pictures without files.

The tokenizer has single bytes, and a token for each special one that the configuration or the
processor names. Sizes are those of the configuration's tower.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from hetero_framework.errors import HeteroError
from hetero_framework.extras.vision.admission import admit_pictures
from hetero_framework.extras.vision.pictures import PictureStore
from hetero_framework.models.cut.tiny import multimodal_classes, short_config
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library

# Values that fit each other, where the defaults do not: of the configuration,
# its tower ("vision"), the image processor ("images") and the processor.
_CLASS_TOKEN = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
_LARGE = {"vision": {"image_size": 384}}
_TILES = {"vision": {"image_size": 364, "patch_size": 14}}
_GRID = {**_CLASS_TOKEN, "vision": {"image_size": 336, "patch_size": 14}}
_WHOLE = {"num_image_tokens": 729, "vision_feature_select_strategy": "full"}
_FITTING: dict[str, dict[str, Any]] = {
    "llava": _CLASS_TOKEN,
    **dict.fromkeys(("llava_next", "llava_next_video"), _GRID),
    "vipllava": {**_CLASS_TOKEN, "vision_feature_layer": [-2, -3]},
    "llava_onevision": {**_WHOLE, "vision": {"image_size": 384, "patch_size": 14}},
    "aria": {
        "vision": {"image_size": 490, "patch_size": 14},
        "images": {"max_image_size": 490},
    },
    "aya_vision": {"image_token": "<picture>", "img_patch_token": "<image>", "img_size": 224},
    "paligemma": {"images": {"image_seq_length": 196}},
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid"), _LARGE),
    "cohere_compass": {"image": "<|IMAGE_PAD|>"},
    "gemma3": {"vision": {"image_size": 896, "patch_size": 14}},
    **dict.fromkeys(("idefics3", "smolvlm"), _TILES),
}
_SPECIAL = re.compile(r"(\w+)_token_(?:id|index)")
_ASKED = re.compile(r"tokenizer(?:\.|, \")(?!add_)(\w+)_token\b")


def try_pictures(name: str) -> str:
    """The verdict on a multimodal class, or on that of a model type, with pictures: "admitted", or
    a word and the reason. Empty for a class without pictures."""
    classes = multimodal_classes()
    name = next((known for known, kind in classes.items() if name in (known, kind)), "")
    try:
        with quiet_library():
            config = short_config(name) if name else PretrainedConfig()
            if not (any("vision" in part for part in config.sub_configs) or _images_of(config)):
                return ""
            if type(config) not in PROCESSOR_MAPPING:
                return "cannot be tried here: transformers names no processor for it"
            told = _FITTING.get(config.model_type, {})
            if getattr(config, "vision_config", 0) is None:
                config.vision_config = config.sub_configs["vision_config"]()
            for field, value in told.get("vision", {}).items():
                setattr(config.vision_config, field, value)
            cls: Any = PROCESSOR_MAPPING[type(config)]
            if "image_processor" not in cls.get_attributes():
                return ""  # it takes videos alone
            processor = _made(cls, config, told)
    except (HeteroError, *LIBRARY_ERRORS) as error:
        return f"cannot be tried here: no processor of its defaults is made ({briefly(error)})"
    try:
        admit_pictures(config, processor, partial(PictureStore, processor, config, Path()))
    except HeteroError as error:
        lacks, why = isinstance(error.__cause__, ImportError), error.message.partition(": ")[2]
        return f"{'cannot be tried here' if lacks else 'refused'}: {why or error.message}"
    return "admitted"


def _images_of(config: PretrainedConfig) -> Any:
    """The class of the image processor of a model type; None without one."""
    found = IMAGE_PROCESSOR_MAPPING.get(type(config), None)
    return found.get("pil") or found["torchvision"] if isinstance(found, dict) else found


def _made(cls: Any, config: Any, told: Mapping[str, Any]) -> Any:
    """The processor of this class for a configuration."""
    vision = getattr(config, "vision_config", config)
    for name in told.keys() & vars(config).keys():
        setattr(config, name, told[name])
    processors: Any = PROCESSOR_MAPPING
    names = processors._model_mapping
    alike = {kind for kind, name in names.items() if name == cls.__name__}
    types = (c for c in IMAGE_PROCESSOR_MAPPING if c.model_type in alike)
    images = (_images_of(config) or _images_of(next(types)()))()
    sized = {**_fitting(images.to_dict(), vision), **told.get("images", {})}
    picture = told.get("image", "<image>")
    known = {
        "tokenizer": _tokenizer(cls, config, picture),
        "image_processor": type(images)(**sized),
    }
    parts = [known.get(part) for part in cls.get_attributes()]
    takes = inspect.signature(cls.__init__).parameters.keys() - {"self", *cls.get_attributes()}
    how = {n: told.get(n, getattr(config, n, getattr(vision, n, None))) for n in takes}
    lax: Any = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
    return lax(*parts, **{name: value for name, value in how.items() if value is not None})


def _fitting(fields: Mapping[str, Any], vision: Any) -> dict[str, Any]:
    """The settings of an image processor that the tower decides."""
    edge = getattr(vision, "image_size", None)
    edge = edge[0] if isinstance(edge, (list, tuple)) else edge
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(edge, int) and name in ("size", "crop_size"):
            sized = {"height", "width"} | ({"shortest_edge"} if len(value) == 1 else set())
            found[name] = {each: edge if each in sized else old for each, old in value.items()}
        elif isinstance(value, int) and isinstance(getattr(vision, name, None), int):
            found[name] = getattr(vision, name)
    return found


def _tokenizer(cls: Any, config: PretrainedConfig, picture: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of a configuration at their places. `picture`: the text
    of that of a picture."""
    ids = dict(_special(config.to_dict()))
    asked = {*_ASKED.findall(inspect.getsource(inspect.getmodule(cls) or cls))}
    if "context_image" in asked and "image" in ids:  # by which the model knows a picture
        ids["context_image"] = ids.pop("image")
    free = (number for number in count(3) if number not in ids.values())
    for name in sorted(asked | {"pad", "eos", "unk", "image"}):
        ids.setdefault(name, next(free))
    texts = {name: f"<{name}>" for name in ids} | {"image": picture}
    words = {texts[name]: number for name, number in ids.items()}
    words |= {letter: next(free) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    named = {f"{name}_token": text for name, text in texts.items()}
    usual = {f"{name}_token": named.pop(f"{name}_token") for name in ("pad", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **usual, extra_special_tokens=named)


def _special(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The special tokens of a configuration, the outermost last."""
    inner = [token for v in fields.values() if isinstance(v, dict) for token in _special(v)]
    told = ((_SPECIAL.fullmatch(str(name)), value) for name, value in fields.items())
    return inner + [(m[1], v) for m, v in told if m and isinstance(v, int) and v >= 0]
