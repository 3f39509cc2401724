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
    """The form of `quant_method` auto-round. Raises ModelError for settings that no form has."""
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
