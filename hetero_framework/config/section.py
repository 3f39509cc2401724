"""The base class of every section of the file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr

WorkerId = StrictInt | StrictStr


class Section(BaseModel):
    """A part of the file: immutable, strict, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
