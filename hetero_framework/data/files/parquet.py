"""Parquet, and the rows of any table of Arrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    import pyarrow


def records(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in plain_rows(batch, file.schema_arrow):
                    number += 1
                    yield Record(f"{path} row {number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged Parquet file after row {number} ({error})") from error


class ClassNumber(int):
    """The number of a class, whose data set also says what all of them are called."""

    names: tuple[str, ...] = ()


def class_names(features: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Of columns with (lists of) a `ClassLabel` of `datasets`, what the classes are called."""
    found = {}
    for column, feature in (features or {}).items():
        while hasattr(feature, "feature"):
            feature = feature.feature
        if (names := getattr(feature, "names", None)) is not None:
            found[column] = tuple(names)
    return found


def with_class_names(row: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The row whose numbers of classes know their names."""
    return {**row, **{name: _named(row[name], names[name]) for name in names.keys() & row.keys()}}


def _named(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if type(value) is int:
        value = ClassNumber(value)
        value.names = names
    return value


def plain_rows(
    table: pyarrow.Table | pyarrow.RecordBatch, schema: pyarrow.Schema
) -> Iterator[dict[str, Any]]:
    """The rows of a part of a table as JSON would have them; `schema` is that of the file, which
    knows the features of `datasets`. A column of objects has one type for all rows, so that each
    object has every key: nulls that fill it up are left out, as TRL's `remove_none_values` does.
    Columns of JSON (the `Json` feature of `datasets`) hold texts, which are parsed."""
    return map(row_converter(schema), table.to_pylist())


def row_converter(schema: pyarrow.Schema | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes of a row of `datasets` one of `plain_rows`."""
    names: dict[str, tuple[str, ...]] = {}
    if schema is not None and b"huggingface" in (schema.metadata or {}):
        from datasets import Features  # slow

        features = Features.from_arrow_schema(schema)
        schema, names = features.arrow_schema, class_names(features)
    types = {field.name: field.type for field in schema or ()}

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        values = {name: _plain(value, types.get(name)) for name, value in row.items()}
        return with_class_names(values, names)

    return plain


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
