"""AWQ ("gemm"), whose numbers of 4 bits have a scale and a zero for each group, and AutoRound.

Numbers are packed along the outputs, eight in a 32-bit word in the order 0 2 4 6 1 3 5 7: qweight
[in, out / 8]; qzeros [groups, out / 8]; scales [groups, out]. A weight is (number - zero) x scale,
in the type of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import Ends, Form, Layout, Parts, unpacked
from hetero_framework.extras.stored_formats.gptq import Gptq

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""
# Values of AutoRound's packing_format.
_LESS_ONE = ("auto", "auto_round:gptq", "auto_round:auto_gptq")
_ZEROS = ("auto_round", "auto_round:gptqmodel")
_AWQ = ("auto_round:awq", "auto_round:auto_awq")


class Awq(Gptq):
    """`quant_method` awq."""

    ends: ClassVar[Ends] = {"values": ("qweight",), "scales": ("scales",), "zeros": ("qzeros",)}
    known: ClassVar[Mapping[str, Sequence[object]]] = {
        **{name: of for name, of in Gptq.known.items() if name[:4] not in ("bits", "chec")},
        "bits|w_bit|wbits": (None, 4),
        "checkpoint_format|version|format": (None, "gemm"),
    }
    step = 8

    def checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        made = super().checked(settings) | {"bits": 4, "desc_act": None}
        if str(made.get("backend")).lower() == "llm-awq":  # which packs otherwise
            raise self.refused("backend", "the layout gemm", made["backend"])
        if made.get("zero_point") is not None:
            made["sym"] = not made["zero_point"]  # transformers adds a sym that says nothing
        return made

    def layout(self, parts: Parts) -> Layout:
        inputs, words = parts["values"].get_shape()
        groups = math.prod(parts["scales"].get_shape()[:1])
        return (words * 8, inputs), {"scales": [groups, words * 8], "zeros": [groups, words]}

    def zeros(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        return _outputs(parts["zeros"][:, first // 8 : last // 8].to(device))

    def numbers(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        return _outputs(parts["values"][:, first // 8 : last // 8].to(device))


def _outputs(words: Tensor) -> Tensor:
    """The numbers of words [rows, W], in the order of the outputs: [rows, 8 W]."""
    numbers: Tensor = unpacked(words.t(), 4).unflatten(0, (-1, 8))[:, list(_PLACES)]
    return numbers.flatten(0, 1).t().to(torch.int16)


def auto_round(settings: dict[str, Any], source: str) -> Form:
    """The form of `quant_method` auto-round: the layout of GPTQ or AWQ, as `packing_format` says.
    Raises ModelError for settings that no form has."""
    packing = settings.get("packing_format", "auto")
    version = {"checkpoint_format": "gptq_v2" if packing in _ZEROS else "gptq"}
    layers = settings.get("extra_config") or {}
    left = [name for name, own in layers.items() if (own.get("bits") or 0) > 8]
    own = {key: settings.get(key) for key in ("bits", "group_size", "sym", "data_type")}
    given = settings | {"extra_config": None, "modules_to_not_convert": left}
    form = Awq(given, source) if packing in _AWQ else Gptq(given | version, source)
    if packing not in _LESS_ONE + _ZEROS + _AWQ:
        raise form.refused("packing_format", "the layouts of GPTQ and AWQ")
    for name in layers.keys() - left:
        if any(layers[name].get(key) not in (None, own[key]) for key in own):
            can = "weights that all have as many bits, and groups and zeros of one kind,"
            raise form.refused("extra_config", can, {name: layers[name]})
    return form
