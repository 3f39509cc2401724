"""Data and tokenizers that a run is given as Python objects: they become files of its output."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict

from torch import Tensor

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.files import NamingOf, replace_directory
from hetero_framework.engine.stage_api import Outcome
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import EvalPrediction


class ComputedMetrics(Protocol):
    """The metrics that the user computes of an evaluation's predictions."""

    def try_out(
        self, cluster: Cluster, step: int, evaluate: Callable[[str], Mapping[str, Any]]
    ) -> None:
        """Have the user's functions work before the first step, `evaluate` where they need a whole
        set. Raises ConfigError where one fails, or gives no number for the best model's metric."""

    def of_set(
        self,
        outcomes: Sequence[Outcome],
        labels: Sequence[Tensor],
        prefix: str,
        taken: Collection[str],
    ) -> dict[str, Any]:
        """The metrics of an evaluation set, given the outcomes and labels of its micro-batches, the
        beginning of their names, and names that they must not have. Raises CallbackError."""


COMPUTE: Final = "compute_metrics"
PREPROCESS: Final = "preprocess_logits_for_metrics"
GIVEN = "given"
"""Their directory in the run's output."""


class Given(TypedDict, total=False):
    """What `train` may be given beside the configuration, under the Trainer's names."""

    train_dataset: Any
    """A `datasets.Dataset`, or records (a list or another iterable of mappings)."""
    eval_dataset: Any
    """The same, or a dictionary of several by their names."""
    processing_class: Any
    """A tokenizer."""
    callbacks: Sequence[Any]
    """Of transformers, instances or classes."""
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None
    """Called with all predictions of an evaluation set."""
    preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Any] | None
    """Makes the predictions of logits and labels; otherwise they are the likeliest tokens."""


def with_objects(config: Config, given: Given) -> Config:
    """The configuration that names the files of the data and the tokenizer that are given. Raises
    DataError for data that hold no records, TypeError for what `train` does not take."""
    if unknown := sorted(given.keys() - Given.__annotations__.keys()):
        raise TypeError(f"train() got an unexpected keyword argument {unknown[0]!r}")
    train_dataset, eval_dataset = given.get("train_dataset"), given.get("eval_dataset")
    processing_class = given.get("processing_class")
    place = config.output_dir / GIVEN
    data: dict[str, Any] = {}
    if train_dataset is not None:
        data["train"] = _files("train_dataset", train_dataset, place / "train")
        data |= {"train_split": "train", "mixing": "concatenate"}  # were those of data.train
    if eval_dataset is not None:
        data |= {"eval_split": "test", "val_set_size": None}
    if isinstance(eval_dataset, Mapping):
        data["eval"] = {
            str(name): _files(f"eval_dataset[{name!r}]", rows, place / f"eval_{number}")
            for number, (name, rows) in enumerate(eval_dataset.items())
        }
    elif eval_dataset is not None:
        data["eval"] = _files("eval_dataset", eval_dataset, place / "eval")
    if data:
        config = config.with_changes(data=data)
    if processing_class is not None:
        folder = _saved(processing_class.save_pretrained, place / "tokenizer")
        config = config.with_changes(model={"tokenizer": str(folder)})
    return config


def _files(name: str, rows: Any, path: Path) -> str:
    """Where these rows are saved; `name` is that of the argument."""
    return str(_saved(_dataset(name, rows).save_to_disk, path))


def _dataset(name: str, rows: Any) -> Any:
    import datasets

    if isinstance(rows, datasets.Dataset):
        return rows
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise DataError(
            f"{name} is a {type(rows).__name__}, which holds no records",
            hint="give a datasets.Dataset, or a list or another iterable of dictionaries",
        )
    records = list(rows)
    if not all(isinstance(record, Mapping) for record in records):
        raise DataError(f"{name}: each of its records is a dictionary")
    return datasets.Dataset.from_list(records)


def _saved(save: Any, path: Path) -> Path:
    """Save whole or not at all: an earlier run's may be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with NamingOf(path):
        save(str(partial))
    replace_directory(partial, path, path.with_name(f".{path.name}.old"))
    return path
