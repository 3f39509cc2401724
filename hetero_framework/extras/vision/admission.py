"""The trial of a model that is to train with pictures: a tiny copy sees one, whole and cut in two.

Nothing here knows an architecture. The copy has random weights, the widths of `shrink`, and what
the model's own processor makes. It is cut where all of a picture has to be in the hidden state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PretrainedConfig

from hetero_framework.data.batches import PICTURES, MicroBatch
from hetero_framework.errors import DataError, ModelError
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import seeing_layers
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.tiny import shrink
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.verify.equivalence import build_both, deterministic, remembered

_TEXT = " a picture and a text"
_HINT = 'take the pictures out and set "training.objective": "sft", or take another model'
_MORE = "its later layers need more of a picture than the hidden state: a cut changes the result"


def admit_pictures(config: PretrainedConfig, processor: Any, make_store: Callable[[], Any]) -> None:
    """Compare a tiny copy that sees a picture with its cut self, unless it is known to be equal.
    `make_store` makes a PictureStore with the model's `processor`. Raises ModelError where a bit
    differs, and ArchitectureError for a model that cannot be cut at all."""
    about = processor.to_dict(), seeing_layers(config)
    find = functools.partial(_compare, config, make_store)
    remembered(f"pictures {about}", config, (), find, Path(__file__).parent)


def _compare(config: PretrainedConfig, make_store: Callable[[], Any]) -> bool:
    begin = f"pictures cannot be trained with a {config.model_type} model"
    what = "its processor is of another kind"
    try:
        with quiet_library(), torch.no_grad():
            inputs = _batch(make_store())
            what = "no tiny copy of it runs on a picture"
            tiny = _tiny(config)
            layers = introspect(tiny).num_layers
            ranges = ranges_between([0, seeing_layers(config), layers])
            whole, (first, last) = build_both(tiny, ranges, None, sees=True)
            for part in (whole, first, last):
                part.train(False)  # a tower may have dropout
            inputs["input_ids"] = _tiny_ids(inputs["input_ids"], config, tiny)
            stock = {n.removeprefix(PICTURES): t for n, t in inputs.items() if n != "position_ids"}
            expected = whole(**stock, use_cache=False).logits
            what = "a part of it does not run alone"
            later = {n: t for n, t in inputs.items() if not n.startswith(PICTURES)}
            if not introspect(tiny).reads_ids(ranges[1].start, layers):
                del later["input_ids"]
            found = last.logits(later, first.forward(inputs, ()))
    except (DataError, *LIBRARY_ERRORS) as error:
        raise ModelError(f"{begin}: {what} ({briefly(error)})", hint=_HINT) from error
    if not torch.equal(found, expected):
        raise ModelError(f"{begin}: {_MORE}", hint=_HINT)
    return True


def _batch(store: Any) -> MicroBatch:
    """A micro-batch of a text with a picture, and one without. Raises ValueError where the
    processor makes other tokens of a text than the tokenizer does."""
    file = BytesIO()
    Image.radial_gradient("L").resize((60, 44)).convert("RGB").save(file, "PNG")
    tokens = store.add({"bytes": file.getvalue()}, "a try")
    processor, how = store.processor, {"add_special_tokens": False}
    ids, text = (processor.tokenizer(t, **how)["input_ids"] for t in (tokens + _TEXT, _TEXT))
    theirs = processor(images=[[store.image(0)]], text=[store.placeholder + _TEXT], **how)
    if [*theirs["input_ids"][0]] != ids:
        raise ValueError("it changes more of a text than a picture's place")
    padding = [0] * (len(ids) - len(text))
    mask = torch.tensor([[1] * len(ids), [1] * len(text) + padding])
    batch = {"input_ids": torch.tensor([ids, text + padding]), "attention_mask": mask}
    seen: MicroBatch = store.inputs([[0], []], batch)
    return {**batch, **seen}


def _tiny(config: Any) -> PretrainedConfig:
    tiny = deterministic(shrink(config))
    if hasattr(getattr(config, "vision_config", None), "window_size"):  # in pixels, which stay
        tiny.vision_config.window_size = config.vision_config.window_size
    return tiny


def _tiny_ids(ids: torch.Tensor, config: PretrainedConfig, tiny: PretrainedConfig) -> torch.Tensor:
    """The ids in the vocabulary of the tiny copy, special tokens at their places."""
    special = dict(zip(_special(config.to_dict()), _special(tiny.to_dict()), strict=True))
    return torch.tensor([[special.get(i, 3 + i % 100) for i in row] for row in ids.tolist()])


def _special(fields: dict[str, Any]) -> Iterator[Any]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif str(name).endswith(("token_id", "token_index")):
            yield value if isinstance(value, int) else None
