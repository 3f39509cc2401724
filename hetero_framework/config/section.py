"""The base class of every section of the file, and the kinds of values in it."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    field_validator,
)
from pydantic_core import PydanticKnownError
from pydantic_core.core_schema import CoreSchema, ValidationInfo, no_info_after_validator_function

from hetero_framework import registry


def with_unit(unit: str, **limits: Any) -> Any:
    """A number's unit, for the documentation and the JSON Schema, and its limits."""
    return Field(json_schema_extra={"unit": unit}, **limits)


class Effect(Enum):
    """What another value of a setting does to the trained result. The mark stands in the annotation
    of the field; without one, the `effect` of its section counts."""

    IDENTITY = "it is another run"
    RESULT = "the result is another"
    ROUNDING = "the result is the same but for rounding"
    FREE = "the result is the same"


class Scope(Enum):
    """Whether all islands need the same value. Without a mark they do for IDENTITY and RESULT."""

    ALL_ISLANDS = "they do"
    PER_ISLAND = "each has its own; what follows from it is compared, such as tokens and weights"


class Mark(Enum):
    """Further facts about a setting."""

    ON_CARD = "the card of a result has it: it shapes the result and holds neither path nor name"
    TIMELESS = "it changes often, and a part of a model takes no other time with another value"
    SOURCE = "one setting of the section with this mark is given, and no other"


@dataclass(frozen=True)
class ReadIf:
    """The condition for a setting to have an effect; without a mark, its section's `read_if`
    counts. "beta": that setting is set. "loss_type=ipo|hinge": it has one of these values.
    "optim!=sgd": it has another value. " and " binds closer than " or ". A function asks the
    registry for the condition when it is needed."""

    given: str | Callable[[], str]

    @property
    def condition(self) -> str:
        return self.given if isinstance(self.given, str) else self.given()


@dataclass(frozen=True)
class NameOf:
    """A text that is a name in a table of the registry, or one of the `others`. `setting` is its
    place in the file: by it, heart.toml names the extra of a name that is absent here."""

    kind: str
    setting: str
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All names that are allowed, sorted."""
        return sorted({*registry.names(self.kind), *self.others})

    def _checked(self, value: str) -> str:
        if value in self.names:
            return value
        if (extra := registry.extra_for(self.setting, value)) is not None:
            raise ValueError(registry.lacks(f'"{value}"', extra))
        *first, last = (f"'{name}'" for name in self.names)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": self.names, **handler(schema)}


def whole_steps(value: float, counted: str = "steps") -> float:
    """`value` itself. Raises ValueError unless it is a whole number or a share."""
    if value >= 1 and value != int(value):
        raise ValueError(
            f"must be a whole number of {counted}, or a share of all {counted} below 1"
        )
    return value


def whole_samples(value: float | None) -> float | None:
    """As `whole_steps`."""
    return value if value is None else whole_steps(value, "samples")


IDENTITY, RESULT, ROUNDING, FREE = Effect
ALL_ISLANDS, PER_ISLAND = Scope
ON_CARD, TIMELESS, SOURCE = Mark

WorkerId = StrictInt | StrictStr
Name = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Port = Annotated[int, with_unit("TCP port", ge=1, le=65535)]
Layer = Annotated[int, with_unit("layer", ge=0)]
Seconds = Annotated[float, with_unit("seconds", gt=0)]
Tokens = Annotated[int, with_unit("tokens", ge=1)]
Samples = Annotated[int, with_unit("samples", ge=1)]
MicroBatches = Annotated[int, with_unit("micro-batches", ge=1)]
STEPS_OR_SHARE = "steps, or a share of all steps when below 1"
Steps = Annotated[float, with_unit(STEPS_OR_SHARE, gt=0), AfterValidator(whole_steps)]


def checked_id(value: str, what: str) -> str:
    """`value` itself. Raises ValueError unless it can name a process in files and on the wire."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(
            f"{what} has 1 to 64 letters, digits, '.', '_' or '-', and begins with neither '.' nor"
            " '-'"
        )
    return value


def sections_of(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The classes of the file's sections, or of the entries of a list, by name."""
    classes = {}
    for name, field in root.model_fields.items():
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                classes[name] = kind
    return classes


def section_at(root: type[BaseModel], keys: Sequence[str | int]) -> type[BaseModel]:
    """The class of the section in which the last of these keys stands."""
    found = root
    for key in keys[:-1]:
        field = next((f for n, f in found.model_fields.items() if key in (n, f.alias)), None)
        if field is not None:
            found = next(classes_in(field.annotation), found)
    return found


def classes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes_in(part)


class Section(BaseModel):
    """A part of the file: immutable, strict, no unknown keys. The string below a field is its
    description in the JSON Schema, in docs/configuration.md and in errors. Its last sentence,
    "Elsewhere: lr, alpha.", has the names of the setting in other tools and in `hetero convert`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    effect: ClassVar[Effect] = RESULT
    scope: ClassVar[Scope | None] = None
    read_if: ClassVar[ReadIf | None] = None

    @classmethod
    def of(cls, section: Section) -> Self:
        """`section` as one of this class. Settings that the file's schema does not have are at
        their defaults."""
        if isinstance(section, cls):
            return section
        return cls.model_validate(section.model_dump(include={*cls.model_fields}))


class WholeFile(Section):
    """The outermost section. It is validated with a dictionary as context, which takes each field
    that is valid by itself. So disagreements between two fields are reported even where a third
    field is invalid."""

    extras: ClassVar[frozenset[str]] = frozenset()
    """The extras whose settings the schema holds beside those of the heart."""

    @field_validator("*")
    @classmethod
    def _note_valid(cls, value: Any, info: ValidationInfo) -> Any:
        info.context[info.field_name] = value  # type: ignore[index]
        return value
