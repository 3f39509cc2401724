"""Data and tokenizers that a run is given as Python objects: they become files of its output."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetero_framework.config import Config
from hetero_framework.core.files import replace_directory
from hetero_framework.errors import DataError

GIVEN = "given"
"""Their directory in the run's output."""


def with_objects(
    config: Config, *, train_dataset: Any, eval_dataset: Any, processing_class: Any
) -> Config:
    """The configuration that names the files of these objects, where they are not None.

    Args:
        train_dataset: A `datasets.Dataset`, or records (a list or another iterable of mappings);
            `eval_dataset` too.
        processing_class: A tokenizer.

    Raises DataError for what holds no records.
    """
    place, data = config.output_dir / GIVEN, {}
    for name, rows in (("train", train_dataset), ("eval", eval_dataset)):
        if rows is not None:
            data[name] = str(_saved(_dataset(name, rows).save_to_disk, place / name))
    if data:
        config = config.with_changes(data=data)
    if processing_class is not None:
        folder = _saved(processing_class.save_pretrained, place / "tokenizer")
        config = config.with_changes(model={"tokenizer": str(folder)})
    return config


def _dataset(name: str, rows: Any) -> Any:
    import datasets

    if isinstance(rows, datasets.Dataset):
        return rows
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise DataError(
            f"{name}_dataset is a {type(rows).__name__}, which holds no records",
            hint="give a datasets.Dataset, or a list or another iterable of dictionaries",
        )
    records = list(rows)
    if not all(isinstance(record, Mapping) for record in records):
        raise DataError(f"{name}_dataset: each of its records is a dictionary")
    return datasets.Dataset.from_list(records)


def _saved(save: Any, path: Path) -> Path:
    """Save whole or not at all: an earlier run's may be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save(str(partial))
    replace_directory(partial, path, path.with_name(f".{path.name}.old"))
    return path
