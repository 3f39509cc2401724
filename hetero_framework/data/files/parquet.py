"""Parquet files, and the rows of any table of Arrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.data.sources import MAX_LINE_BYTES, Record, shorten
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_ROWS = 1000
_BATCH_BYTES = 64 << 20
_SPLIT = "divide it into several rows"
_MEASURED = {"string", "large_string", "binary", "large_binary"}  # pyarrow has their lengths


def records(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    def batches(schema: list[pyarrow.Schema]) -> Iterator[pyarrow.RecordBatch]:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [file.schema.column(k) for k in range(len(file.schema))]
            _check_sizes(path, file.metadata)
        # A text that many rows share is in memory once.
        shared = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        how: Any = {"read_dictionary": shared, "pre_buffer": False, "buffer_size": 2**16}
        with pyarrow.parquet.ParquetFile(path, **how) as file:
            schema.append(file.schema_arrow)
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            each = sum(g.total_byte_size for g in groups) // max(1, file.metadata.num_rows)
            rows = min(_ROWS, _BATCH_BYTES // max(1, each))
            yield from file.iter_batches(batch_size=max(1, rows))

    return table_records(str(path), batches, "Parquet file")


def _check_sizes(path: Path, about: Any) -> None:
    """Raise DataError where the rows of a group are on average longer than a row may be."""
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            most = max(column.total_uncompressed_size // 2, column.num_values)
            if most > MAX_LINE_BYTES * max(1, group.num_rows):
                text = f"{path}: rows of group {number + 1} are longer than"
                raise DataError(f"{text} {MAX_LINE_BYTES >> 20} MiB", hint=_SPLIT)


def table_records(
    name: str, read: Callable[[list[Any]], Iterator[Any]], what: str
) -> Iterator[Record]:
    """The rows of a table as records. `read` appends the schema to its argument and then yields
    parts of the table. Raises DataError for a damaged table, with the last row that was read, for
    two columns of one name, and for a row that is too long."""
    import pyarrow

    number, schema = 0, list[Any]()
    try:
        for table in read(schema):
            if not number and (twice := _twice(schema[0])) is not None:
                text = f"{name}: two columns are called {shorten(twice)!r}"
                raise DataError(text, hint="rename one")
            if not number:
                plain = row_converter(schema[0])
            for part in _parts(table):
                if part is None:
                    text = f"{name} row {number + 1}: the row is longer than"
                    raise DataError(f"{text} {MAX_LINE_BYTES >> 20} MiB", hint=_SPLIT)
                for row in part.to_pylist():
                    number += 1
                    yield Record(f"{name} row {number}", plain(row))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: damaged {what} after row {number} ({error})") from error
    except (OverflowError, ValueError) as error:  # no UTF-8, no JSON, or no date that Python has
        text = f"{name} cannot be read behind row {number}: {error}"
        raise DataError(text, hint="write the table without that column, or as text") from error


def _twice(fields: Any) -> str | None:
    """A name that two fields of a table, or of an object in it, share; None without one."""
    names = [field.name for field in fields]
    for field in fields:
        if names.count(field.name) > 1:
            return str(field.name)
        inner = [field.type.field(k) for k in range(getattr(field.type, "num_fields", 0))]
        if (found := _twice(inner)) is not None:
            return found
    return None


def _parts(table: Any) -> Iterator[Any]:
    """Parts of the table, at most as long as a row may be; None stands for a longer row."""
    if len(table) <= _ROWS and sum(map(_length, table.columns)) <= MAX_LINE_BYTES:
        yield table
    elif len(table) <= 1:
        yield None
    else:
        half = len(table) // 2
        for part in (table.slice(0, half), table.slice(half)):
            yield from _parts(part)


def _length(column: Any) -> int:
    """Approximate bytes of a column as JSON. A text that several rows share counts in each row."""
    import pyarrow
    import pyarrow.compute as pc

    if isinstance(column, pyarrow.ChunkedArray):
        return sum(map(_length, column.chunks))
    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _length(column.storage)
    if pyarrow.types.is_dictionary(kind):
        texts = column.dictionary
        if str(texts.type) in ("string_view", "binary_view"):
            texts = texts.cast(pyarrow.large_binary())
        if str(texts.type) not in _MEASURED:
            return len(column) * max(8, _length(texts) // max(1, len(texts)))
        lengths = pc.binary_length(texts).take(column.indices)
        return 2 * len(column) + (pc.sum(lengths).as_py() or 0)
    if pyarrow.types.is_map(kind):
        return 2 * len(column) + _length(column.keys) + _length(column.items)
    if pyarrow.types.is_struct(kind):
        return 2 * len(column) + sum(map(_length, column.flatten()))
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return 2 * len(column) + _length(column.flatten())
    return max(2 * len(column), 0 if pyarrow.types.is_primitive(kind) else column.nbytes)


class ClassNumber(int):
    """The number of a class, with the names that the data set gives all its classes."""

    names: tuple[str, ...] = ()


def class_names(features: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Names of classes by column, for columns with (lists of) a `ClassLabel` of `datasets`."""
    found = {}
    for column, feature in (features or {}).items():
        while hasattr(feature, "feature"):
            feature = feature.feature
        if (names := getattr(feature, "names", None)) is not None:
            found[column] = tuple(map(str, names))
    return found


def with_class_names(row: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The row with each class number as a `ClassNumber` that knows the names."""
    return {**row, **{name: _named(row[name], names[name]) for name in names.keys() & row.keys()}}


def _named(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if type(value) is int:
        value = ClassNumber(value)
        value.names = names
    return value


def row_converter(schema: pyarrow.Schema | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that turns a row of a table into a row as JSON has it. `schema` may hold features
    of `datasets`. All objects of a column have the same keys; nulls that fill up missing keys are
    left out, as TRL's `remove_none_values` does. Texts in columns of JSON (the `Json` feature of
    `datasets`) are parsed."""
    names: dict[str, tuple[str, ...]] = {}
    if schema is not None and b"huggingface" in (schema.metadata or {}):
        from datasets import Features  # slow

        try:
            features = Features.from_arrow_schema(schema)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"features of `datasets` in its schema: {error}") from error
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
    if isinstance(value, Decimal):  # as text tables have such numbers
        return float(value) if getattr(kind, "value_type", kind).scale > 0 else int(value)
    return value
