"""Weights as compressed-tensors writes them: fp8, int8, packed whole numbers, NVFP4 and MX.

The library makes rows full, by the group of `config_groups` that takes their module. It multiplies
in the type of the scales, 4 and 6 bits in bfloat16; fp8 of experts is multiplied in float32, as
transformers does it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from torch import Tensor, nn

from hetero_framework.errors import ModelError
from hetero_framework.extras.stored_formats.form import Ends, Form

_UNSAID = (None, "mixed-precision", "fakequant", "dense")
_FLOATS = ("F32", "F16", "BF16")
_EMBEDDINGS = ("emb", "wte")


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
            if inside.get("format", "dense") != "dense" or inside.get("config_groups"):
                raise self.refused(setting, "weights that are neither sparse nor rotated")
        settings = copy.deepcopy(settings)
        try:
            for group in settings["config_groups"].values():
                for args in group.values() if isinstance(group, dict) else ():
                    if isinstance(args, dict):  # weight_g_idx tells the orders the library dropped
                        args.pop("actorder", None)
            config = QuantizationConfig.model_validate(settings)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(
                f"the quantization_config of the model {source!r} is none of compressed-tensors:"
                f" {type(error).__name__}: {error}",
                hint="copy or download config.json again",
            ) from error
        self.step = 32
        self.schemes: dict[str, tuple[Any, Any]] = {}
        for scheme in config.config_groups.values():
            if (args := scheme.weights) is None:
                continue
            form = next((f for f in (scheme.format, config.format) if f not in _UNSAID), None)
            form = str(getattr(form or infer_module_format(nn.Linear, scheme), "value", form))
            known = [f for f in BaseCompressor.registered_names() if f.endswith("-quantized")]
            if form not in known:
                raise self.refused("format", ", ".join(known), form)
            if args.strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
                raise self.refused("strategy", "tensor, channel, group and block", args.strategy)
            self.step = math.lcm(self.step, (args.block_structure or [1])[0])
            compressor = BaseCompressor.get_value_from_registry(form)
            self.schemes |= dict.fromkeys(scheme.targets, (scheme, compressor))

    def weight(
        self, name: str, slices: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> Any:
        """See StoredFormat. A full weight may have the scales beside it that it was trained for."""
        if "" in slices or slices["values"].get_dtype() in _FLOATS:
            return super().weight(name, {"": slices.get("", slices.get("values"))}, dtype, device)
        module = name.removesuffix(".weight")
        kinds = [nn.Linear(1, 1, device="meta"), nn.Embedding(1, 1, device="meta")]
        if any(part in module.rpartition(".")[2] for part in _EMBEDDINGS):
            kinds.reverse()
        for kind in kinds:
            if targets := match_targets(module, kind, self.schemes):
                scheme, compressor = self.schemes[targets[0]]
                more = {"scheme": scheme, "compressor": compressor, "name": name}
                return super().weight(name, {**slices, **more}, dtype, device)
        raise self.error(self.made[name]["values"], "no group of config_groups takes its module")

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        args, values = parts["scheme"].weights, parts["values"]
        found = {role: parts[role].get_shape() for role in self.ends if role in parts}
        bits = {"I32": 32, "U8": 8}.get(values.get_dtype(), args.num_bits)  # of a stored number
        shape = [*found["values"][:-1], found["values"][-1] * bits // args.num_bits]
        if "sizes" in parts:
            shape = parts["sizes"][...].tolist()
        if len(shape) != 2:
            raise ValueError(f"its shape is {shape}; rows and columns are expected")
        height, width = _block(args, shape)
        grid = [-(-shape[0] // height), -(-shape[1] // width)]
        words = [-(-grid[0] * args.num_bits // 32), grid[1]]
        is_packed = "zeros" in parts and parts["zeros"].get_dtype() == "I32"
        expected = {
            "values": [shape[0], -(-shape[1] * args.num_bits // bits)],
            "scales": grid,
            "zeros": words if is_packed else grid,
            "order": [shape[1]],
        }
        for role, sizes in expected.items():
            has = found.get(role, sizes)
            if has != sizes and (args.strategy != "tensor" or math.prod(has) != 1):
                raise ValueError(f"its {role} have the shape {has}, not {sizes}")
        if args.strategy != "block" and shape[1] % width:
            raise ValueError(f"its {shape[1]} columns do not divide into groups of {width}")
        if "zeros" not in parts and not args.symmetric:
            raise ValueError("it has no zeros (weight_zero_point)")
        if "order" in parts and parts["order"][...].max() >= grid[1]:
            raise ValueError(f"its order (weight_g_idx) has more than {grid[1]} groups")
        return shape[0], shape[1]

    def rows(self, parts: Mapping[str, Any], first: int, last: int, device: torch.device) -> Tensor:
        """See Form."""
        scheme, shape = parts["scheme"], self.shape(parts)
        args, values = scheme.weights, parts["values"][first:last].to(device)
        height, _ = _block(args, shape)
        whole = slice(first // height, -(-last // height))
        words = slice(first * args.num_bits // 32, -(-last * args.num_bits // 32))
        state = {"weight": values, "weight_packed": values}  # each format takes its own
        state["weight_shape"] = torch.tensor([last - first, shape[1]])
        for role in ("scales", "zeros", "global"):
            if role in parts:
                part = parts[role]
                packed = role == "zeros" and part.get_dtype() == "I32"
                at = ... if role == "global" or not part.get_shape() else words if packed else whole
                state[self.ends[role][0]] = part[at].to(device)
        if values.dtype == torch.int32 and not args.symmetric and args.strategy != "tensor":
            zeros = state["weight_zero_point"]
            if zeros.dtype != torch.int32:  # as versions before 0.9 wrote them
                zeros = pack_to_int32(zeros.to(torch.int8), args.num_bits, 0)
            # The library takes the bytes of a transposed copy, but makes none of a single row.
            zeros = zeros.t().clone(memory_format=torch.contiguous_format)
            state["weight_zero_point"] = zeros.t()
        if args.type == "float" and args.num_bits == 8 and "experts" in parts["name"].split("."):
            state["weight_scale"] = state["weight_scale"].float()
        order = parts["order"][...].to(device).long() if "order" in parts else None
        if order is not None and order.min() >= 0:  # each input is a group then, of numbers its own
            for name in {"weight_scale", "weight_zero_point"} & state.keys():
                state[name] = state[name][:, order]
            scheme, alone = copy.copy(scheme), copy.copy(args)
            scheme.weights, alone.group_size = alone, 1
        made: Tensor = parts["compressor"].decompress(state, scheme)["weight"]
        return made


def _block(args: Any, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of a weight that have a scale in common."""
    if args.block_structure is not None:
        return args.block_structure[0], args.block_structure[1]
    height = shape[0] if args.strategy == "tensor" else 1
    return height, args.group_size if (args.group_size or -1) > 0 else shape[1]
