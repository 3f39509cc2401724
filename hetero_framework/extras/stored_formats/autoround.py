"""AutoRound: weights in the layout of GPTQ or AWQ, as `packing_format` says."""

from __future__ import annotations

from typing import Any

from hetero_framework.extras.stored_formats.awq import Awq
from hetero_framework.extras.stored_formats.form import Form
from hetero_framework.extras.stored_formats.gptq import Gptq

_LESS_ONE = ("auto", "auto_round:gptq", "auto_round:auto_gptq")
_ZEROS = ("auto_round", "auto_round:gptqmodel")
_AWQ = ("auto_round:awq", "auto_round:auto_awq")


def auto_round(settings: dict[str, Any], source: str) -> Form:
    """The form of `quant_method` auto-round. Raises ModelError for those that it does not have."""
    packing = settings.get("packing_format", "auto")
    version = {"checkpoint_format": "gptq_v2" if packing in _ZEROS else "gptq"}
    form = Awq(settings, source) if packing in _AWQ else Gptq(settings | version, source)
    if packing not in _LESS_ONE + _ZEROS + _AWQ:
        raise form.refused("packing_format", "the layouts of GPTQ and AWQ")
    own = {layer.get("bits") for layer in (settings.get("extra_config") or {}).values()}
    if own - {None, settings.get("bits"), 16, 32}:
        raise form.refused("extra_config", "weights that all have as many bits")
    return form
