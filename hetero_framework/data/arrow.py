"""Rows of Arrow tables as the objects that JSON would give.

A column of objects has one type for all rows, so each object has every key, null where it was
absent. Such nulls are left out, as TRL's `remove_none_values` does. Columns of the `Json` feature
of `datasets` hold JSON text, which is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def plain_rows(
    table: pyarrow.Table | pyarrow.RecordBatch, schema: pyarrow.Schema
) -> Iterator[dict[str, Any]]:
    """The rows of a part of a table without the nulls that Arrow filled in; `schema` is that of the
    file, which knows the features of `datasets`."""
    if b"huggingface" in (schema.metadata or {}):
        from datasets import Features  # slow

        schema = Features.from_arrow_schema(schema).arrow_schema
    types = {field.name: field.type for field in schema}
    for row in table.to_pylist():
        yield {name: _plain(value, types.get(name)) for name, value in row.items()}


def _plain(value: Any, kind: Any) -> Any:
    if value is None or kind is None:
        return value
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value) if isinstance(value, str) else value
    if types.is_struct(kind) and isinstance(value, dict):
        fields = {field.name: field.type for field in kind}
        return {
            key: _plain(item, fields.get(key)) for key, item in value.items() if item is not None
        }
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_plain(item, kind.value_type) for item in value]
    return value
