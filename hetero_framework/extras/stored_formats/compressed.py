"""Weights as compressed-tensors writes them: fp8, int8, packed whole numbers, NVFP4 and MX.

The library dequantises rows, by the group of `config_groups` that takes their module. It multiplies
in the type of the scales, and numbers of 4 and 6 bits in bfloat16. fp8 of experts is multiplied in
float32, as in transformers.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match, match_targets
from torch import Tensor, nn

from hetero_framework.errors import ModelError
from hetero_framework.extras.stored_formats.form import FLOATS, INDICES, Ends, Form, Layout, Parts

_UNSAID = (None, "mixed-precision", "fakequant", "dense")
# The types of values and scales, by the beginning of a format's name.
_TYPES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "pack-": (("I32",), FLOATS),
    "nvfp4-": (("U8",), ("F8_E4M3",)),
    "mxfp8-": (("F8_E4M3",), ("U8",)),
    "mxfp": (("U8",), ("U8",)),
    "": (("I8",), FLOATS),  # formats without packing
}
_EMBEDDINGS = ("emb", "wte")
_ORDERED = ("group", "dynamic", "true")
_PACKED_ZEROS = ("group", "channel")  # strategies whose zeros the library packs


class CompressedTensors(Form):
    """`quant_method` compressed-tensors, and its name before that, sparseml."""

    ends: ClassVar[Ends] = {
        "values": ("weight_packed", "weight"),
        "scales": ("weight_scale",),
        "zeros": ("weight_zero_point",),
        "global": ("weight_global_scale",),
        "order": ("weight_g_idx",),
        "sizes": ("weight_shape",),
    }
    types: Mapping[str, Sequence[str]] = {"sizes": INDICES, "order": INDICES, "global": FLOATS}
    known: ClassVar = {"sparsity_config": (), "transform_config": ()}
    target = "weight"
    unread = tuple(
        f"{what}_{end}"
        for what in ("input", "output", "q", "k", "v")
        for end in ("scale", "zero_point", "global_scale")
    )

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        for setting in ("sparsity_config", "transform_config"):
            inside = settings.get(setting) or {}
            inside = inside if isinstance(inside, dict) else {"format": inside}
            if inside.get("format", "dense") != "dense" or inside.get("config_groups"):
                raise self.refused(setting, "weights that are neither sparse nor rotated")
        settings = copy.deepcopy(settings)
        ordered = []
        try:
            for key, group in settings["config_groups"].items():
                for args in group.values() if isinstance(group, dict) else ():
                    if isinstance(args, dict) and str(args.get("actorder")).lower() in _ORDERED:
                        del args["actorder"]  # the library does not know these; weight_g_idx does
                        ordered += [key] if args is group.get("weights") else []
            config = QuantizationConfig.model_validate(settings)
        except (ValueError, KeyError, AttributeError, TypeError, NotImplementedError) as error:
            raise ModelError(
                f"the quantization_config of the model {source!r} is none of compressed-tensors:"
                f" {type(error).__name__}: {error}",
                hint="copy or download config.json again",
            ) from error
        self.step, self.left = 32, config.ignore or []
        self.is_compressed = str(getattr(config.quantization_status, "value", "")) == "compressed"
        self.schemes: dict[str, dict[str, Any]] = {}
        for key, scheme in config.config_groups.items():
            if scheme.weights is not None:
                self._add(scheme, config.format, key in ordered)

    def _add(self, scheme: Any, of_all: Any, is_ordered: bool) -> None:
        """Enter a group by its targets. `of_all` is the format where it has none of its own. Raises
        ModelError."""
        args = scheme.weights
        stated = [
            str(getattr(form, "value", form))
            for form in (scheme.format, of_all)
            if form not in _UNSAID
        ]
        form = (stated or [infer_module_format(nn.Linear, scheme).value])[0]
        known = [f for f in BaseCompressor.registered_names() if f.endswith("-quantized")]
        if form not in known or len({*stated}) > 1:
            raise self.refused("format", ", ".join(known), " and ".join(stated))
        if args.strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
            raise self.refused("strategy", "tensor, channel, group and block", args.strategy)
        if not 1 <= args.num_bits <= 8:
            raise self.refused("num_bits", "1 to 8 bits", str(args.num_bits))
        before = {t: self.schemes[t]["scheme"].weights for t in scheme.targets if t in self.schemes}
        if twice := [target for target, other in before.items() if other != args]:
            raise self.refused("config_groups", "targets of one group", twice)
        if args.dynamic:
            raise self.refused("dynamic", "weights with scales of their own", args.dynamic)
        self.step = math.lcm(self.step, (args.block_structure or [1])[0])
        compressor = BaseCompressor.get_value_from_registry(form)
        how = {"scheme": scheme, "compressor": compressor, "ordered": is_ordered}
        values, scales = next(types for part, types in _TYPES.items() if form.startswith(part))
        values = ("F8_E4M3",) if (values, args.type) == (("I8",), "float") else values
        zeros = ("I8", *(FLOATS if args.type == "float" else ()))
        if args.strategy in _PACKED_ZEROS and args.type == "int":
            zeros = ("I32", "I8")
        how["types"] = {"values": values, "scales": scales, "zeros": zeros}
        self.schemes |= dict.fromkeys(scheme.targets, how)

    def how(self, module: str) -> dict[str, Any] | None:
        """See Form. Raises ValueError for a module that no group takes."""
        kinds = [nn.Linear(1, 1, device="meta"), nn.Embedding(1, 1, device="meta")]
        if any(part in module.rpartition(".")[2] for part in _EMBEDDINGS):
            kinds.reverse()
        try:
            for kind in kinds:
                if targets := match_targets(module, kind, self.schemes):
                    if is_match(module, kind, self.left):
                        return None
                    of_experts = "experts" in module.split(".")
                    return {**self.schemes[targets[0]], "of_experts": of_experts}
        except re.error as error:
            raise self.refused("targets or ignore", "regular expressions", str(error)) from error
        raise ValueError("no group of config_groups takes its module")

    def weight(
        self, name: str, slices: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> Any:
        """See StoredFormat. Beside a full weight may be the scales that it was trained for."""
        if "" not in slices and slices["values"].get_dtype() in FLOATS and not self.is_compressed:
            slices = {"": slices["values"]}
        return super().weight(name, slices, dtype, device)

    def layout(self, parts: Parts) -> Layout:
        args, values = parts["how"]["scheme"].weights, parts["values"]
        found = {role: parts[role].get_shape() for role in self.ends if role in parts}
        bits = {"I32": 32, "U8": 8}.get(values.get_dtype(), args.num_bits)  # of a stored number
        shape = [*found["values"][:-1], found["values"][-1] * bits // args.num_bits]
        if "sizes" in parts:
            shape = parts["sizes"][...].flatten().tolist()
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"its shape is {shape}; rows and columns are expected")
        height, width = _block(args, shape)
        grid = [-(-shape[0] // height), -(-shape[1] // width)]
        words = [-(-grid[0] * args.num_bits // 32), grid[1]]
        expected = {
            "values": [shape[0], -(-shape[1] * args.num_bits // bits)],
            "scales": grid,
            "zeros": words if _is_packed(parts) else grid,
            "order": [shape[1]],
            "global": [1],
        }
        for role in found.keys() & expected.keys():  # a lone number may have any axes
            is_one = (args.strategy == "tensor" or role == "global") and math.prod(found[role]) == 1
            if role != "values" and is_one:
                expected[role] = found[role]
        if found["values"] == expected["values"] and args.strategy != "block" and shape[1] % width:
            raise ValueError(f"its {shape[1]} columns do not divide into groups of {width}")
        if "zeros" not in parts and not args.symmetric:
            raise ValueError("it has no zeros (weight_zero_point)")
        if ("global" in parts) != (args.strategy == "tensor_group"):
            raise ValueError(f"scales of scales (weight_global_scale) and strategy {args.strategy}")
        if parts["how"]["ordered"] and "order" not in parts and grid[1] > 1:
            raise ValueError("it has no order (weight_g_idx), and quantization_config has actorder")
        return (shape[0], shape[1]), expected

    def contents(self, parts: Parts, shape: tuple[int, ...]) -> None:
        args = parts["how"]["scheme"].weights
        if "order" in parts and int((order := parts["order"][...]).max()) >= 0:
            _, size = _block(args, shape)
            if int(order.min()) < 0 or int(order.max()) >= -(-shape[1] // size):
                raise ValueError(
                    f"its order (weight_g_idx) has other groups than {size} inputs make"
                )
            if int(order.bincount().max()) > size:
                raise ValueError(f"its order (weight_g_idx) has groups of more than {size}")
        if "zeros" in parts and args.symmetric and bool((parts["zeros"][...] != 0).any()):
            raise ValueError("it has zeros (weight_zero_point), and its group is symmetric")

    def rows(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        scheme, (shape, _) = parts["how"]["scheme"], self.layout(parts)
        args, values = scheme.weights, parts["values"][first:last].to(device)
        height, _ = _block(args, shape)
        whole = slice(first // height, -(-last // height))
        words = slice(first * args.num_bits // 32, -(-last * args.num_bits // 32))
        state = {"weight": values, "weight_packed": values}  # each format takes its own
        state["weight_shape"] = torch.tensor([last - first, shape[1]])
        for role in ("scales", "zeros", "global"):
            if role in parts:
                part = parts[role]
                packed = role == "zeros" and _is_packed(parts)
                at = ... if role == "global" or not part.get_shape() else words if packed else whole
                state[self.ends[role][0]] = part[at].to(device)
        if values.dtype == torch.int32 and not args.symmetric and args.strategy in _PACKED_ZEROS:
            zeros = state["weight_zero_point"]
            if zeros.dtype != torch.int32:  # as versions before 0.9 wrote them
                zeros = pack_to_int32(zeros.to(torch.int8), args.num_bits, 0)
            # The library takes the bytes of a transposed copy, but does not copy a single row.
            zeros = zeros.t().clone(memory_format=torch.contiguous_format)
            state["weight_zero_point"] = zeros.t()
        if args.type == "float" and args.num_bits == 8 and parts["how"]["of_experts"]:
            state["weight_scale"] = state["weight_scale"].float()
        order = parts["order"][...].to(device).long() if "order" in parts else None
        if order is not None and order.min() >= 0:  # then each input is a group of its own
            for name in {"weight_scale", "weight_zero_point"} & state.keys():
                state[name] = state[name][:, order]
            scheme, alone = copy.copy(scheme), copy.copy(args)
            scheme.weights, alone.group_size = alone, 1
        made: Tensor = parts["how"]["compressor"].decompress(state, scheme)["weight"]
        return made


def _is_packed(parts: Parts) -> bool:
    """Whether zeros are packed into words, as values are."""
    return "zeros" in parts and parts["zeros"].get_dtype() == "I32"


def _block(args: Any, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of a weight that have a scale in common."""
    if args.block_structure is not None:
        return args.block_structure[0], args.block_structure[1]
    height = shape[0] if args.strategy == "tensor" else 1
    return height, args.group_size if (args.group_size or -1) > 0 else shape[1]
