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
    """The metrics that the user's functions compute from an evaluation's predictions."""

    def try_out(
        self, cluster: Cluster, step: int, evaluate: Callable[[str], Mapping[str, Any]]
    ) -> None:
        """Try the user's functions before the first step; `evaluate` gives them a whole set if they
        need it. Raises ConfigError if they fail or give no number for the best model's metric."""

    def of_set(
        self,
        outcomes: Sequence[Outcome],
        labels: Sequence[Tensor],
        prefix: str,
        taken: Collection[str],
    ) -> dict[str, Any]:
        """The metrics of an evaluation set, from the outcomes and labels of its micro-batches.
        `prefix` is cut off their names. Raises CallbackError, also for a name in `taken`."""


COMPUTE: Final = "compute_metrics"
PREPROCESS: Final = "preprocess_logits_for_metrics"
GIVEN = "given"
"""Directory of the given objects in the run's output."""


class Given(TypedDict, total=False):
    """What `train` may be given beside the configuration, under the Trainer's names."""

    train_dataset: Any
    """A `datasets.Dataset`, or records (a list or another iterable of mappings)."""
    eval_dataset: Any
    """Like train_dataset, or a dictionary of several data sets by name."""
    processing_class: Any
    """A tokenizer."""
    callbacks: Sequence[Any]
    """Callbacks of transformers, as instances or classes."""
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None
    """Called with all predictions of an evaluation set."""
    preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Any] | None
    """Makes predictions from logits and labels; without it they are the likeliest tokens."""


def with_objects(config: Config, given: Given) -> Config:
    """Save the given data and tokenizer, and return the configuration with their paths. Raises
    DataError for data without records, TypeError for an argument that `train` does not take."""
    if unknown := sorted(given.keys() - Given.__annotations__.keys()):
        raise TypeError(f"train() got an unexpected keyword argument {unknown[0]!r}")
    train_dataset, eval_dataset = given.get("train_dataset"), given.get("eval_dataset")
    processing_class = given.get("processing_class")
    place = config.output_dir / GIVEN
    data: dict[str, Any] = {}
    if train_dataset is not None:
        data["train"] = _files("train_dataset", train_dataset, place / "train")
        data |= {"train_split": "train", "mixing": "concatenate"}  # the old values fit the old data
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
        if isinstance(processing_class, (str, type)):
            raise DataError(f"processing_class: {processing_class!r} is no tokenizer")
        folder = _saved(processing_class.save_pretrained, place / "tokenizer")
        config = config.with_changes(model={"tokenizer": str(folder)})
    return config


def _files(name: str, rows: Any, path: Path) -> str:
    """Save the rows and return their path. `name` is the argument's name, for errors."""
    dataset = _dataset(name, rows)
    if not dataset.num_rows:
        raise DataError(f"{name} holds no records: it is empty")
    return str(_saved(dataset.save_to_disk, path))


def _dataset(name: str, rows: Any) -> Any:
    import datasets

    if isinstance(rows, datasets.Dataset):
        return rows
    is_iterable = isinstance(rows, Iterable) and not isinstance(rows, Mapping)
    records = list(rows) if is_iterable else []
    if not is_iterable or not all(isinstance(record, Mapping) for record in records):
        raise DataError(
            f"{name}: this {type(rows).__name__} holds no records, which are dictionaries",
            hint="give a datasets.Dataset, or a list or another iterable of dictionaries; of a"
            " DatasetDict one split, of a DataFrame Dataset.from_pandas(...); a file's name goes"
            f' into data={{"{name.partition("_")[0]}": ...}}',
        )
    return datasets.Dataset.from_list(records)


def _saved(save: Any, path: Path) -> Path:
    """Save whole or not at all, since an earlier run's data may be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with NamingOf(path):
        save(str(partial))
    replace_directory(partial, path, path.with_name(f".{path.name}.old"))
    return path
