"""Makes a weight from the several tensors in which a checkpoint holds it.

A form is a `quant_method` of config.json. It says which tensors belong to a weight, by the ends of
their names, and computes rows of the weight. The numbers are a function of the files alone: each
form rounds as the format's own library does, and only then to the dtype of the run.
"""

from __future__ import annotations

import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.errors import ModelError

Ends = Mapping[str, Sequence[str]]
Parts = Mapping[str, Any]
Layout = tuple[tuple[int, ...], dict[str, list[int]]]
_NUMBERS_AT_ONCE = 1 << 19  # stay in a processor's cache, and in memory that is used again
_ONE_AT_A_TIME = threading.Lock()  # the library reads on several threads, each with its own memory
FLOATS, INDICES = ("F32", "F16", "BF16"), ("I32", "I64")
_FULL = {"F64", *FLOATS, "I64", "I32", "I16", "BOOL"}
# Ends of names that belong to other forms.
_FOREIGN = ("qweight", "weight_packed", "_blocks", "_scale_inv", "absmax", "SCB", "_qdata")
# Settings that change numbers in some form. A form that does not name such a setting refuses it.
_OTHERS = (
    *("dynamic", "dynamic_config", "extra_config", "quantized_layers", "adapter", "rotation"),
    *("rotation_config", "weight_only", "is_marlin_format", "pack_dtype", "data_type"),
    *("super_bits", "sparsity_config", "transform_config"),
)
_SIZES = {"bits", "num_bits", "group_size", "quant_algo"}  # of settings by module
_OFF: tuple[object, ...] = (None, False, "", [], {})
_EDGE = r"(?:(?<=\.)|(?=\.|$))"  # of a part of a module's name


class Form(ABC):
    """How the weights of one checkpoint are stored: a `StoredFormat`."""

    ends: ClassVar[Ends]
    """Ends of the names of a weight's tensors, by role. All forms have "values" and "scales"."""
    target: ClassVar[str | None] = None
    """The end of a weight's name, in place of its values' end; None where the two are alike."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Ends of names of tensors that only an inference engine reads."""
    needed: tuple[str, ...] = ("values", "scales")
    """Roles without which there is no weight."""
    types: Mapping[str, Sequence[str]] = {}
    """The types that a tensor may have, by role, as safetensors names them."""
    axes: ClassVar[tuple[int, ...]] = (2,)
    """How many axes values may have."""
    signed: ClassVar[bool] = False
    """Whether a scale may be negative."""
    known: ClassVar[Mapping[str, Sequence[object]]] = {}
    """The values that can be read, by "setting|its other name"; () stands for all values."""
    step: int = 1
    """How many rows of a weight are stored together."""

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        """`settings` are the `quantization_config` of the model `source`. Raises ModelError for
        settings that the form does not have."""
        self.settings, self.source = settings, source
        self.settings = self.checked(settings)
        self.files: Mapping[str, str] = {}
        self.made: dict[str, dict[str, str]] = {}

    def checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings under their first names. Raises ModelError for values that cannot be read, and
        for two names of one setting that have different values."""
        made = dict(settings)
        known = dict.fromkeys(_OTHERS, (None,)) | {"modules_to_not_convert": ()} | dict(self.known)
        for names, values in known.items():
            given = {n: v for n in names.split("|") if (v := settings.get(n)) not in _OFF}
            said, value = [*given.items(), (names.split("|")[0], None)][0]
            if len({str(v).lower() for v in given.values()}) > 1:
                raise self.refused(
                    " and ".join(given), "names of one setting with one value", given
                )
            if names.startswith("modules_") and value is not None and not isinstance(value, list):
                raise self.refused(said, "a list of names", value)
            if values and (value.lower() if isinstance(value, str) else value) not in values:
                can = ", ".join(str(v) for v in values if v is not None) or "weights without it"
                raise self.refused(said, can, value)
            made[names.split("|")[0]] = value if given else made.get(names.split("|")[0])
        named = {name for names in self.known for name in names.split("|")}
        for key in settings.keys() - named:
            inner = settings[key].values() if isinstance(settings[key], dict) else ()
            if any(isinstance(own, dict) and _SIZES & own.keys() for own in inner):
                raise self.refused(key, "weights without it", settings[key])
        return made

    def how(self, module: str) -> dict[str, Any] | None:
        """The settings of a module's weight; None where they leave the module as it was. Raises
        ModelError."""
        left = self.settings.get("modules_to_not_convert") or []
        left = [*left, "lm_head"] if self.settings.get("lm_head") is False else left
        try:
            if any(re.match(f"(?:{p}){_EDGE}", module) or module.endswith(p) for p in left):
                return None
            for pattern, own in (self.settings.get("dynamic") or {}).items():
                if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
                    return None if pattern[:2] == "-:" else self.checked(self.settings | own)
        except (re.error, TypeError, AttributeError) as error:
            raise self.refused("patterns of modules", "regular expressions", str(error)) from error
        return self.settings

    def weights(self, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
        self.files = files
        for name in files:
            base, end = self._split(name)
            if base is None:
                continue
            parts = {"values": name}
            for role, ends in self.ends.items():
                if role != "values":
                    found = [base + e for e in ends if base + e in files and base + e != name]
                    if len(found) > 1:
                        raise self.error(name, f"it has both {found[0]} and {found[1]}")
                    parts |= {role: found[0]} if found else {}
            if "scales" in parts:
                target = base + (end if self.target is None else self.target)
                if target in self.made or (target in files and target != name):
                    raise self.error(name, f"{target} is stored a second time")
                self.made[target] = parts
            elif self.target not in (None, end):
                raise self.error(
                    name, f"it has no scales: there is no {base}{self.ends['scales'][0]}"
                )
        taken = {part for parts in self.made.values() for part in parts.values()}
        left = [name for name in files if name not in taken and not name.endswith(self.unread)]
        for name in left:
            if name.endswith(_FOREIGN):
                raise self.error(
                    name,
                    "it belongs to another form than the quant_method of config.json,"
                    f" {self.settings.get('quant_method')!r}, or to no weight",
                )
        return self.made | {name: {"": name} for name in left}

    def _split(self, name: str) -> tuple[str | None, str]:
        """The part of a name that all tensors of a weight have in common; None for a tensor that
        holds no values."""
        for end in self.ends["values"]:
            if name.endswith(end):
                return name.removesuffix(end), end
        return None, ""

    def weight(
        self, name: str, slices: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> Any:
        if "" in slices:
            if (stored := slices[""].get_dtype()) not in _FULL:
                raise self.error(name, f"it is stored as {stored}, and no scales belong to it")
            return slices[""]
        return Weight(self, name, slices, dtype, device if device.type == "cuda" else _CPU)

    def error(self, stored: str, why: str) -> ModelError:
        """The error for a tensor in a file."""
        return ModelError(
            f"{stored} in {self.files[stored]} of the model {self.source!r}: {why}",
            hint="the file is incomplete or damaged, or config.json is that of another model; copy"
            " or download both again",
        )

    def refused(self, setting: str, known: str, value: object = None) -> ModelError:
        """The error for a setting that the form does not have. `value`: a part's own value."""
        return ModelError(
            f"the model {self.source!r} has {setting} {value or self.settings.get(setting)!r} in"
            f" its quantization_config; {known} can be read",
            hint='take the full-precision model with "model.quantization": "nf4"',
        )

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The shape of the weight that these slices make. Raises ValueError where the slices do not
        fit each other or the settings."""
        types = {**self.types, **parts["how"].get("types", {})}
        for role, ends in self.ends.items():
            if role not in parts:
                if role in self.needed:
                    raise ValueError(f"it has no {role} ({ends[0]})")
                continue
            stored, sizes = parts[role].get_dtype(), parts[role].get_shape()
            if stored not in types.get(role, (stored,)):
                what = (
                    "it is stored as {}, and has scales"
                    if role == "values"
                    else "its {1} are stored as {0}"
                )
                can = " or ".join(types[role])
                raise ValueError(f"{what.format(stored, role)}; {can} can be read")
            if 0 in sizes:
                raise ValueError(f"its {role} have the shape {sizes}, which is empty")
        if len(sizes := parts["values"].get_shape()) not in self.axes:
            raise ValueError(f"it is no matrix (its shape is {sizes})")
        shape, expected = self.layout(parts)
        for role, sizes in expected.items():
            if role in parts and (has := parts[role].get_shape()) != sizes:
                raise ValueError(f"its {role} have the shape {has}, not {sizes}")
        return shape

    @abstractmethod
    def layout(self, parts: Parts) -> Layout:
        """The weight's shape, by the shape of its values, and the shapes that its other tensors
        must have, by role. Raises ValueError where there is no such weight."""

    def contents(self, parts: Parts, shape: tuple[int, ...]) -> None:  # noqa: B027
        """Raise ValueError for numbers, other than values, that contradict the settings."""

    @abstractmethod
    def rows(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        """The rows first .. last - 1 of the weight; `first` is a multiple of `step`."""


_CPU = torch.device("cpu")


class Weight:
    """A weight that is computed when it is read, some rows at a time. It is read like an unread
    slice of safetensors."""

    def __init__(
        self, form: Form, name: str, parts: Parts, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._form, self._dtype, self._device = form, dtype, device
        names, how = form.made[name], None
        try:
            if (how := form.how(name.removesuffix(".weight"))) is None:
                raise ValueError("it has scales, and quantization_config leaves its module out")
            self._parts = parts = {**parts, "how": how}
            self._shape = form.shape(parts)
            form.contents(parts, self._shape)
        except ValueError as error:
            said = [
                f"{n} {v!r}" for k in form.known if (v := (how or {}).get(n := k.split("|")[0]))
            ]
            by = f" (by {', '.join(said)} in quantization_config)" if said else ""
            raise form.error(names["values"], f"{error}{by}") from error
        for role in ("scales", "global", "zeros"):
            if role in names and (wrong := _unusable(parts[role][...], role, form.signed)):
                why = f"{wrong} of its numbers are zero, infinite or NaN, or negative"
                raise form.error(names[role], why)

    def get_shape(self) -> list[int]:
        """The sizes of the weight."""
        return [*self._shape]

    def __getitem__(self, index: Any) -> Tensor:
        """The rows of a slice, or all rows for `...`."""
        first, last, _ = (slice(None) if index is ... else index).indices(self._shape[0])
        step, width = self._form.step, torch.Size(self._shape[1:]).numel()
        size = max(1, _NUMBERS_AT_ONCE // width // step) * step
        made = torch.empty(last - first, *self._shape[1:], dtype=self._dtype, device=self._device)
        with _ONE_AT_A_TIME, torch.no_grad():
            for begin in range(first - first % step, last, size):
                end = min(begin + size, self._shape[0])
                rows = self._form.rows(self._parts, begin, end, self._device)
                low, high = max(begin, first), min(end, last)
                made[low - first : high - first] = rows[low - begin : high - begin]
        return made


def _unusable(numbers: Tensor, role: str, signed: bool) -> int:
    """The count of numbers that no quantiser would write."""
    if numbers.dtype == torch.uint8:  # exponents of two; 255 is NaN
        return int((numbers == 255).sum())
    wide = numbers.to(torch.float32)
    wrong = ~torch.isfinite(wide)
    if role != "zeros":
        wrong |= torch.zeros_like(wrong) if signed else wide < 0
        if numbers.dtype != torch.float8_e4m3fn:  # there the scale of a tiny block may be 0
            wrong |= wide == 0
    return int(wrong.sum())


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Whole numbers of `bits` each, packed into the 32-bit words along the first axis, the lowest
    bits first; a number may lie in two words. [W, ...] -> uint8 [32 W / bits, ...]"""
    each = bits // math.gcd(bits, 32)  # words after which the pattern repeats
    words = words.unflatten(0, (-1, each))
    count, mask = 32 * each // bits, (1 << bits) - 1
    made = torch.empty(len(words), count, *words.shape[2:], dtype=torch.uint8, device=words.device)
    for k in range(count):
        word, shift = divmod(k * bits, 32)
        number = words[:, word] >> shift  # the sign comes in from above, and is masked away
        if shift + bits > 32:
            low = (1 << (32 - shift)) - 1
            number = (number & low) | (words[:, word + 1] << (32 - shift))
        made[:, k] = number & mask
    return made.flatten(0, 1)
