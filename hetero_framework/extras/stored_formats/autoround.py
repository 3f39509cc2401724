"""AutoRound: weights in the layout of GPTQ or AWQ, as `packing_format` says."""

from __future__ import annotations

from typing import Any

from hetero_framework.errors import ModelError
from hetero_framework.extras.stored_formats.awq import Awq
from hetero_framework.extras.stored_formats.form import Form
from hetero_framework.extras.stored_formats.gptq import Gptq

_ZEROS_LESS_ONE = ("auto", "auto_round:gptq", "auto_round:auto_gptq")
_ZEROS = ("auto_round", "auto_round:gptqmodel")
_AWQ = ("auto_round:awq", "auto_round:auto_awq")


def auto_round(settings: dict[str, Any], source: str) -> Form:
    """The form of `quant_method` auto-round. Raises ModelError for another packing, and for weights
    of several widths."""
    packing = settings.get("packing_format", "auto")
    bits = settings.get("bits")
    own = [layer.get("bits", bits) for layer in (settings.get("extra_config") or {}).values()]
    if packing not in _ZEROS_LESS_ONE + _ZEROS + _AWQ or {*own} - {bits, 16, 32}:
        raise ModelError(
            f"the model {source!r} has packing_format {packing!r} with {bits} bits, and"
            f" {sorted({*own})} in its extra_config; packings of GPTQ and AWQ can be read, with as"
            " many bits for all weights",
            hint='take the full-precision model with "model.quantization": "nf4"',
        )
    if packing in _AWQ:
        return Awq(settings, source)
    version = "gptq_v2" if packing in _ZEROS else "gptq"
    return Gptq({**settings, "checkpoint_format": version}, source)
