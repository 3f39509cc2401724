"""GPTQ, AWQ and AutoRound: whole numbers with a scale and a zero for each group of inputs.

Numbers of 2, 3, 4 or 8 bits are packed along the inputs into 32-bit words: qweight
[in x bits / 32, out]; qzeros [groups, out x bits / 32]; scales [groups, out]. g_idx has the group
of each input. A group's inputs are not in a row where the most important inputs were quantised
first (`desc_act`). A weight is scale x (number - zero), in the type of the scales. The format
"gptq" stores each zero minus one, "gptq_v2" the zero itself. AWQ packs otherwise, and AutoRound as
GPTQ or AWQ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import (
    FLOATS,
    INDICES,
    Ends,
    Form,
    Layout,
    Parts,
    unpacked,
)

_FORMATS = {"gptq": 1, "gptq_v2": 0}
_DEFAULT = 128  # inputs of a group, where nothing states them
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""
# Values of AutoRound's packing_format.
_LESS_ONE = ("auto", "auto_round:gptq", "auto_round:auto_gptq")
_ZEROS = ("auto_round", "auto_round:gptqmodel")
_AWQ = ("auto_round:awq", "auto_round:auto_awq")


class Gptq(Form):
    """`quant_method` gptq. `dynamic` gives modules settings of their own, or leaves them out."""

    ends: ClassVar[Ends] = {
        "values": ("qweight",),
        "scales": ("scales",),
        "zeros": ("qzeros",),
        "order": ("g_idx",),
    }
    target = "weight"
    needed = ("values", "scales", "zeros")
    types: Mapping[str, Sequence[str]] = {
        "values": ("I32",),
        "scales": FLOATS,
        "zeros": ("I32",),
        "order": INDICES,
    }
    signed = True
    known: ClassVar[Mapping[str, Sequence[object]]] = {
        "bits|w_bit|wbits|nbits|num_bits|weight_bits": (2, 3, 4, 8),
        "group_size|q_group_size|groupsize": (),
        "checkpoint_format|format": (None, *_FORMATS),
        "quant_method|method": (),
        "pack_dtype": (None, "int32"),
        "data_type": (None, "int"),
        "dynamic": (),
    }
    step = 32

    def layout(self, parts: Parts) -> Layout:
        bits, (words, out) = int(parts["how"]["bits"]), parts["values"].get_shape()
        groups = math.prod(parts["scales"].get_shape()[:1])
        if words * 32 % bits or out * bits % 32:
            raise ValueError(f"its shape {[words, out]} is none of whole words at {bits} bits")
        inputs, zeros = words * 32 // bits, [groups, out * bits // 32]
        return (out, inputs), {"scales": [groups, out], "zeros": zeros, "order": [inputs]}

    def contents(self, parts: Parts, shape: tuple[int, ...]) -> None:
        how, (out, inputs), groups = parts["how"], shape, parts["scales"].get_shape()[0]
        size = _group(how, inputs, groups)
        if "order" in parts:
            order = parts["order"][...].long()
            if wrong := int(((order < 0) | (order >= groups)).sum()):
                raise ValueError(f"{wrong} inputs (g_idx) are in none of its {groups} groups")
            if (most := int(order.bincount().max())) > size:
                raise ValueError(f"{most} inputs (g_idx) are in one group of {size}")
            if how.get("desc_act") is False and bool((order != torch.arange(inputs) // size).any()):
                raise ValueError("its groups (g_idx) are not in a row, and desc_act is false")
        elif how.get("desc_act") and groups > 1:
            raise ValueError("it has no order (g_idx), and desc_act is true")
        middle = 1 << int(how["bits"]) - 1
        if how.get("sym") and bool(
            (self.zeros(parts, 0, out, torch.device("cpu")) != middle).any()
        ):
            raise ValueError(
                f"its zeros (qzeros) are not all {middle}, as quantization_config says by sym or"
                f" zero_point and the format {how['checkpoint_format']}"
            )

    def zeros(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        """The zeros of outputs from `first` on, a multiple of `step`: [groups, outputs]."""
        how = parts.get("how", self.settings)
        bits, less = int(how["bits"]), _FORMATS[(how.get("checkpoint_format") or "gptq").lower()]
        zeros = parts["zeros"][:, first * bits // 32 : -(-last * bits // 32)].to(device)
        if bits != 3:  # added to whole words: a zero stored as -1 borrowed from the zero above it
            zeros, less = zeros + less * sum(1 << k for k in range(0, 32, bits)), 0
        made = unpacked(zeros.t(), bits).t()[:, : last - first].to(torch.int16) + less
        return made & (1 << bits) - 1

    def numbers(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        """The numbers before zeros are subtracted: [inputs, outputs]."""
        bits = int(parts.get("how", self.settings)["bits"])
        return unpacked(parts["values"][:, first:last].to(device), bits).to(torch.int16)

    def rows(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        values = self.numbers(parts, first, last, device)
        scales = parts["scales"][:, first:last].to(device)
        zeros = self.zeros(parts, first, last, device)
        if "order" in parts:
            order = parts["order"][...].to(device).long()
        else:
            size = _group(parts.get("how", self.settings), len(values), len(scales))
            order = torch.arange(len(values), device=device) // size
        made: Tensor = (values - zeros[order]).to(scales.dtype) * scales[order]
        return made.t()


def _group(how: Mapping[str, Any], inputs: int, groups: int) -> int:
    """The number of inputs in a group; the last group may have fewer. Raises ValueError where this
    makes another number of groups."""
    if (size := how.get("group_size")) is None:
        size = _DEFAULT if -(-inputs // _DEFAULT) == groups or inputs % groups else inputs // groups
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"quantization_config has group_size {size!r}")
    size = inputs if size == -1 else size
    if -(-inputs // size) != groups:
        raise ValueError(f"its {inputs} inputs do not divide into {groups} groups of {size}")
    return size


class Awq(Gptq):
    """`quant_method` awq ("gemm"), of 4 bits. Numbers are packed along the outputs, eight in a word
    in the order of _PLACES: qweight [in, out / 8]; qzeros [groups, out / 8]; scales [groups, out].
    """

    ends: ClassVar[Ends] = {"values": ("qweight",), "scales": ("scales",), "zeros": ("qzeros",)}
    known: ClassVar[Mapping[str, Sequence[object]]] = {
        **{name: of for name, of in Gptq.known.items() if name[:4] not in ("bits", "chec")},
        "bits|w_bit|wbits|nbits|num_bits|weight_bits": (None, 4),
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
    by_module = layers.values() if isinstance(layers, dict) else [layers]
    are_known = all(isinstance(o, dict) and type(o.get("bits") or 0) is int for o in by_module)
    layers = layers if are_known else {}
    left = [name for name, own in layers.items() if (own.get("bits") or 0) > 8]
    own = {key: settings.get(key) for key in ("bits", "group_size", "sym", "data_type")}
    given = settings | {"extra_config": None, "modules_to_not_convert": left}
    form = Awq(given, source) if packing in _AWQ else Gptq(given | version, source)
    if settings.get("checkpoint_format") not in (None, form.settings["checkpoint_format"]):
        raise form.refused("checkpoint_format and packing_format", "two that agree", settings)
    if packing not in _LESS_ONE + _ZEROS + _AWQ:
        raise form.refused("packing_format", "the layouts of GPTQ and AWQ")
    if not are_known:
        raise form.refused("extra_config", "settings by module", settings["extra_config"])
    for name in layers.keys() - left:
        if any(layers[name].get(key) not in (None, own[key]) for key in own):
            can = "weights that all have as many bits, and groups and zeros of one kind,"
            raise form.refused("extra_config", can, {name: layers[name]})
    return form
