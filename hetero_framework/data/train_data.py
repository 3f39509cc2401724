"""Makes `TrainData` from the configuration."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from hetero_framework import registry
from hetero_framework.config import Config, DataConfig, TrainingConfig
from hetero_framework.config.objectives import rows_of
from hetero_framework.data.batches import LazyBatches, MicroBatch, SampleOrder, pack, padded_left
from hetero_framework.data.examples import Examples, ExamplesBuilder, ExampleSet, Rows, StreamedRows
from hetero_framework.data.formats import Formatter, Tokens
from hetero_framework.data.kinds import ExampleKind, Labels, formatter_for, kind_of
from hetero_framework.data.sources import Record, Source, find_sources, listed, shorten
from hetero_framework.data.splits import SplitReader
from hetero_framework.data.token_cache import find_entry
from hetero_framework.data.tokenizer import TokenizersErrors, choose_pad_token
from hetero_framework.errors import DataError
from hetero_framework.log import at_work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1000  # records tokenised in one call
_ENDS = ("bos", "eos", "cls", "sep")
_NEAR = 4  # most tokens from a token to the next, with white space between them
_TWICE = (
    "warning: two {} follow each other: the text or the chat template has one, and the tokenizer or"
    " data.add_eos adds one (TRL does the same); leave one out"
)


class Corpus(ABC):
    """Token ids that have an order of their own: a data set of the registry's table "corpora".
    `line` is a line for the user, in which {} stands for the files."""

    @property
    @abstractmethod
    def line(self) -> str: ...

    @abstractmethod
    def train(self, training: TrainingConfig) -> tuple[Rows, SampleOrder]:
        """The samples of a run. Raises DataError for settings that do not go with the order."""

    @abstractmethod
    def held_out(self, seed: int) -> Rows:
        """The samples of an evaluation."""


class SourceMix(Protocol):
    """Examples of several sources."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the losses of the sources."""

    def mark(
        self, batch: MicroBatch, of_train: bool, rows: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Add to a micro-batch the source of each token. `rows` has, for each row, the example and
        the number of tokens of each part."""

    def losses(self, named: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The losses of the sources, from the values that the last stage gave for micro-batches."""


@dataclass
class TrainData:
    """Tokenised data and the order in which a run sees them; `report` is lines for the user."""

    examples: ExampleSet
    eval_sets: dict[str, ExampleSet]  # by name; a set without a name has ""
    order: SampleOrder
    settings: DataConfig
    pad_token_id: int
    report: list[str]
    labels: Labels | None = None
    pads_left: bool = False
    mixture: SourceMix | None = None

    @property
    def fingerprint(self) -> str:
        return self.examples.fingerprint

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.order.total_steps

    @property
    def longest(self) -> int:
        """Tokens in the longest example, evaluation included."""
        return max(rows.longest for rows in (self.examples, *self.eval_sets.values()))

    @property
    def row_tokens(self) -> int:
        """Tokens in the longest row; where a row holds several examples, in the longest example."""
        multiple = self.settings.pad_to_multiple_of or 1
        return math.ceil(self.longest / multiple) * multiple

    @property
    def state(self) -> Any:
        """The state of training data that are made during the run; None for other data."""
        return self.examples.state() if isinstance(self.examples, StreamedRows) else None

    def restore(self, state: Any) -> None:
        """Go on from a `state`."""
        if isinstance(self.examples, StreamedRows) and state is not None:
            self.examples.restore(state)

    def close(self) -> None:
        """Stop making training data."""
        getattr(self.examples, "close", lambda: None)()

    @property
    def padding(self) -> float:
        """The share of padding among the tokens of the first epoch; 0 where that is not known."""
        if self.settings.one_row or isinstance(self.examples, StreamedRows):
            return 0.0
        return self.order.padded(self.examples.lengths, self.settings.pad_to_multiple_of or 1)

    def epoch_of(self, step: int) -> float:
        """The epoch, as the Trainer logs it, once `step` (from 0) is done."""
        return self.order.epoch_of(step)

    def step_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of `step` (from 0): a pure function of it."""
        asked, soon = self.order.step_indices(step), getattr(self.examples, "soon", None)
        if soon is not None:
            is_last = step + 1 >= self.total_steps
            soon(asked + ([] if is_last else self.order.step_indices(step + 1)))
        return [self.collate(self.examples, rows) for rows in asked]

    def micro_batch(self, rows: np.ndarray) -> MicroBatch:
        """The micro-batch of the training examples with these numbers."""
        return self.collate(self.examples, rows)

    def largest_batch(self, first_step: int) -> tuple[int, MicroBatch] | None:
        """The micro-batch with the most tokens, padding included, from `first_step` on, and its
        step; None where no step is left."""
        place = self.order.largest(
            self.examples.lengths,
            first_step,
            packed=self.settings.one_row,
            multiple=self.settings.pad_to_multiple_of or 1,
        )
        if place is None:
            return None
        step, number = place
        return step, self.collate(self.examples, self.order.step_indices(step)[number])

    @cached_property
    def pictures(self) -> MicroBatch | None:
        """The largest micro-batch of pictures: the model's inputs for the training examples that
        have the most tokens of pictures, in rows of `row_tokens`. None for texts."""
        if (find := getattr(self.examples, "most_seen", None)) is None:
            return None
        rows = find(self.order.training.per_device_train_batch_size)
        return {**self._kind.collate(self.examples, rows, self.pad_token_id, self.row_tokens)}

    def eval_batches(self, name: str = "") -> LazyBatches:
        """All examples of an evaluation set in order; the last micro-batch may be smaller."""
        examples = self.eval_sets[name]
        numbers = np.arange(len(examples))
        rows = self.order.training.per_device_eval_batch_size

        def make(index: int) -> MicroBatch:
            return self.collate(examples, numbers[index * rows : (index + 1) * rows])

        return LazyBatches(math.ceil(len(numbers) / rows), make)

    def collate(self, examples: ExampleSet, rows: np.ndarray) -> MicroBatch:
        """The micro-batch of these examples, by their numbers."""
        if self.settings.one_row:
            batch = pack(cast(Rows, examples), rows)
        else:
            multiple = self.settings.pad_to_multiple_of
            batch = self._kind.collate(examples, rows, self.pad_token_id, multiple)
        if self.mixture is not None:
            parts = _parts(examples, rows)
            told = [[*chain(*parts)]] if self.settings.one_row else parts
            self.mixture.mark(batch, examples is self.examples, told)
        return padded_left(batch) if self.pads_left else batch

    @cached_property
    def _kind(self) -> ExampleKind:
        return kind_of(self.order.training.data_kind)


def _parts(examples: ExampleSet, rows: np.ndarray) -> list[list[tuple[int, int]]]:
    """(example, tokens) of each part of these rows."""
    lengths = examples.lengths
    of_row = getattr(examples, "parts", lambda row: [(row, int(lengths[row]))])
    return [of_row(int(row)) for row in rows]


def load_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    most: int | None = None,
    stated: Any = None,
) -> TrainData:
    """Read, tokenise and check the first `most` examples of each set of data. `stated` are the
    facts of `LabelReader.stated`, for data with labels. Raises DataError, with file and line, for
    unusable examples, such as one with a token beyond the model's `vocab_size` embeddings."""
    data = config.data
    if data is None:
        raise DataError("the configuration has no data", hint='add "data": {"train": "..."}')
    report: list[str] = []
    if config.training.data_kind != "text" and data.for_texts is not None:
        objective = config.training.objective
        text = f"data.{data.for_texts} is for texts, and training.objective is {objective!r}"
        raise DataError(text, hint="leave it out")
    reader = Reader(data, config.base_dir, tokenizer, vocab_size, report, most, config.training)
    reader.prepare(config, stated)
    train, order, mixture, eval_sets = _training_rows(config, reader)
    for name, spec in data.eval_sets.items():
        held_out = reader.read(f"eval.{name}" if name else "eval", spec, data.eval_split)
        if isinstance(held_out, Corpus):
            eval_sets[name] = samples = held_out.held_out(order.seed)
            reader.look_at(samples)
        else:
            eval_sets[name] = held_out
        if train.fingerprint == eval_sets[name].fingerprint:
            which = f"evaluation data {name}".strip()
            report.append(f"warning: the {which} are the training data")
    if data.one_row:
        pad_token_id, sentence = 0, "no padding: the samples of a micro-batch make one row"
    else:
        pad_token_id, sentence = choose_pad_token(tokenizer, vocab_size)
    # Classifiers' rows are padded as the tokenizer says, for GPT-2's positions, as in the Trainer.
    pads_left = reader.labels is not None and tokenizer.padding_side == "left"
    said = [*report, sentence + ", on the left" * pads_left]
    told = reader.labels, pads_left, mixture if reader.tells_sources else None
    return TrainData(train, eval_sets, order, data, pad_token_id, said, *told)


def _training_rows(
    config: Config, reader: Reader
) -> tuple[Rows, SampleOrder, Any, dict[str, ExampleSet]]:
    """The training rows, their order, the mixture that the rows come from, if any, and the rows
    that are held out."""
    data, training = reader.data, config.training
    if data.streaming:
        stream = registry.needed("streams", "rows", "data.streaming")
        return *stream(config, reader.tokenizer, reader.vocab_size, reader.report), {}
    mixture: Any = None
    held_out: dict[str, ExampleSet] = {}
    found: Rows | Corpus
    if data.sources or data.val_set_size is not None:
        mixture = reader.mixed()
        found = reader.as_rows("train", mixture.train)
        if mixture.held_out is not None:
            held_out[""] = reader.as_rows("eval", mixture.held_out)
    else:
        found = reader.read("train", data.paths, data.train_split)
    if isinstance(found, Corpus):
        train, order = found.train(training)
        reader.look_at(train)
        return train, order, mixture, held_out
    reader.report += reader.kind.remarks(found, training)
    return found, SampleOrder(len(found), training, found.lengths), mixture, held_out


def unused(name: str, fields: dict[str, Any]) -> Iterator[str]:
    """A line that names the fields that are not trained on, with an example of each."""
    if fields:
        shown = (f"{field} ({shorten(str(value), 30)!r})" for field, value in fields.items())
        yield f"{name}: fields that are not used: {listed(shown)}"


def _first_names(sources: list[Source]) -> str:
    names = ", ".join(source.name for source in sources[:3])
    return f"{names} and {len(sources) - 3} more" if len(sources) > 3 else names


def _twice(name: str, sources: list[Source]) -> Iterator[str]:
    """A warning for each file that is named again: its examples count twice."""
    seen: set[Path] = set()
    for source in sources:
        path = Path(source.name) if source.path is None else source.path.resolve()
        if path in seen:
            yield f"warning: data.{name} names {source.name} twice; its examples are trained twice"
        seen.add(path)


def nothing_to_learn(name: str, count: int, cut: DataConfig | None) -> DataError:
    """The error for examples without a token to learn; `cut` has the max_length that cut them."""
    hint = "an example needs two tokens, and a trained one among the later"
    if cut is not None:
        hint = f"data.max_length={cut.max_length} cuts off all of it; raise it"
    text = f"data.{name}: none of the {count:,} examples has a token to learn from"
    return DataError(text, hint=hint)


def kept_part(data: DataConfig) -> slice:
    """The tokens of an example that are kept where it is longer than max_length."""
    most = data.max_length
    if most is not None and data.truncation_mode == "keep_end":
        return slice(-most, None)
    return slice(most)


@dataclass
class Reader:
    """Reads one set of examples after another with the same options."""

    data: DataConfig
    base_dir: Path
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    report: list[str]
    most: int | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    limit: int | None = None
    labels: Labels | None = None
    beside: Any = None

    @property
    def more(self) -> list[Any]:
        """Further arguments of the kind's `formatter` and `kept`, behind the settings."""
        return [thing for thing in (self.labels, self.beside) if thing is not None]

    def prepare(self, config: Config, stated: Any = None) -> None:
        """Find what the kind needs beside texts: the labels of the training data, where all
        examples are read, even if only the first `most` are used, since a file may be sorted by its
        labels; or what `beside` makes."""
        if self.kind.beside is not None:
            self.beside = self.kind.beside(config, self.tokenizer)
        if self.kind.labels is not None:
            parts = replace(self, most=None).parts()
            records = chain.from_iterable(part.records() for part in parts)
            self.labels = self.kind.labels.find(records, stated)

    def parts(self) -> Iterator[Reader]:
        """A reader for each source of the training data."""
        limits = [source.max_samples for source in self.data.sources] or [None]
        for data, limit in zip(self.data.parts, limits, strict=True):
            given = [most for most in (self.most, limit) if most is not None]
            yield replace(self, data=data, most=min(given, default=None), limit=limit)

    def records(self) -> Iterator[Record]:
        """The training data as they are read."""
        sources = find_sources(self.data.paths, self.base_dir)
        reader = self._splits(self.data.train_split, ("train",))
        return islice(reader.read(sources, lambda note: None), self.most)

    def _splits(self, split: str, whole: tuple[str, ...]) -> SplitReader:
        data, numeric = self.data, self.kind.numeric
        if self.labels is not None and self.labels.problem != "regression":
            numeric = replace(numeric, names=self.labels.names)
        return SplitReader(split, whole, data.dataset_config, data.columns, numeric)

    @property
    def kind(self) -> ExampleKind:
        return kind_of(self.training.data_kind)

    def read(self, name: str, spec: str | tuple[str, ...], split: str) -> Rows | Corpus:
        examples = self._read(name, spec, split)
        return examples if isinstance(examples, Corpus) else self.as_rows(name, examples)

    @property
    def tells_sources(self) -> bool:
        """Whether each of several sources has its own loss."""
        return len(self.data.sources) > 1 and self.training.data_kind == "text"

    def mixed(self) -> Any:
        """The mixture of all sources, of which some examples may be held out."""
        asking = "data.train with several sources" if self.data.sources else "data.val_set_size"
        mix = registry.needed("mixtures", "mix", asking)
        names = [source.label for source in self.data.sources] or [""]
        sets, each = [], 1
        for name, part in zip(names, self.parts(), strict=True):
            called = f"train ({name})" if name else "train"
            found = part._read(called, part.data.paths, part.data.train_split)
            if isinstance(found, Corpus):
                raise DataError(
                    f"data.{called} names samples with an order of their own, which are not mixed",
                    hint='write weights before the prefixes: ["0.3", "a", "0.7", "b"]',
                )
            sets.append(found)
            each = max(1, len(found) // len(part._kept(found)))
        mixture = mix(sets, names, self.data, each, self.training.order_seed)
        self.report += mixture.lines
        return mixture

    def as_rows(self, name: str, examples: Examples) -> Rows:
        """The rows that a run sees of these examples."""
        if self.data.packs(name):
            pack = registry.needed("packing", "rows", "data.packing")
            rows, lines = pack(name, examples, self.data)
            self.report += lines
            return cast(Rows, rows)
        return self._kept(examples)

    def _kept(self, examples: Examples) -> Rows:
        return self.kind.kept(examples, self.data, self.training, *self.more)

    def _read(self, name: str, spec: str | tuple[str, ...], split: str) -> Examples | Corpus:
        sources = find_sources(spec, self.base_dir)
        self.report += _twice(name, sources)
        if kind := next((source.kind for source in sources if source.is_parted), None):
            return self._corpus(kind, name, sources, split)
        options = self.data.of_one_source
        if self.limit is not None:
            options["max_samples"] = self.limit
        kind, labels = self.training.data_kind, self.labels
        settings = [name, split, options, self.vocab_size, *[kind] * (kind != "text")]
        if labels is not None:
            settings.append({"problem": labels.problem, "names": labels.names})
        # What lies beside the texts may change where the texts do not.
        known = self.beside is None
        entry = find_entry(sources, self.tokenizer, settings) if known else None
        kept = entry.read() if entry is not None else None
        if kept is not None:
            examples, lines = kept
            self.report += [*lines, f"{name}: tokenised before, taken from the cache"]
            return examples
        examples, lines, lasting = self._make(name, sources, split)
        self.report += lines
        if entry is not None and lasting:
            entry.write(examples, lines)
        return examples

    def _corpus(self, kind: str, name: str, sources: list[Source], split: str) -> Corpus:
        if self.data.packing:
            raise DataError(
                f"data.{name} names {kind}'s files, whose samples are rows already",
                hint="remove data.packing",
            )
        if not registry.has("corpora", kind):
            raise DataError(
                f"data.{name} names {kind}'s files, which need the extra"
                f" {registry.entries('parted')[kind].text}",
                hint="install hetero_framework whole, or name other files",
            )
        known = math.inf if self.vocab_size is None else self.vocab_size
        corpus: Corpus = registry.find("corpora", kind)(name, sources, split, self.data, known)
        self.report.append(f"{name}: {corpus.line.format(_first_names(sources))}")
        return corpus

    def look_at(self, samples: Rows) -> None:
        """Check the ids of the first `self.most` samples, if that is set. A run checks a sample
        when it takes it, since a corpus is too large to be read first."""
        for number in range(min(self.most or 0, len(samples))):
            samples[number]

    def _make(
        self, name: str, sources: list[Source], split: str
    ) -> tuple[Examples, list[str], bool]:
        """The examples, the lines about them, and whether a later run would make the same."""
        whole = ("train",) if name.startswith("train") else ("test", "train")
        notes: list[str] = []
        reader = self._splits(split, whole)
        records = self.kind.records(reader.read(sources, notes.append))
        first = next(records)
        kind = self.training.data_kind
        formatter = formatter_for(kind, first, self.tokenizer, self.data, self.more)
        counts: Counter[str] = Counter()
        looked_at = islice(chain([first], records), self.most)
        examples = self._tokenise(name, looked_at, formatter, counts)
        rest = self.most not in (None, self.limit) and next(records, None) is not None
        if rest:
            notes.append(f"{name}: only the first {self.most:,} examples were looked at")
        origin = _first_names(sources)
        if split != whole[0] or not all(source.is_file for source in sources):
            origin += f", split {split}"
        lines = [
            f"{name}: {len(examples) // (rows_of(kind) + formatter.label_rows):,} {self.kind.noun},"
            f" {len(examples.ids):,} tokens from {origin}",
            f"{name}: format {formatter.name} (fields {listed(first.fields)})",
            *unused(name, formatter.unused),
            *(f"{name}: {line}" for line in self._remarks(counts, formatter)),
            *notes,
        ]
        dated = formatter.renderer is not None and formatter.renderer.uses_date
        return examples, lines, not (dated or rest)

    def _tokenise(
        self, name: str, records: Iterator[Record], formatter: Formatter, counts: Counter[str]
    ) -> Examples:
        """Tokenise; counts the examples read, kept, cut, and left out ("long", "dropped")."""
        builder = ExamplesBuilder()
        packs = self.data.packs(name)
        with TokenizersErrors(), at_work(f"tokenising data.{name}") as show:
            # Records with pictures may have a megabyte each.
            while batch := list(islice(records, _CHUNK if self.beside is None else 8)):
                for _, rows, targets in self.kept(batch, formatter, counts, packs):
                    if targets:
                        builder.targets.append(targets)
                    for row in rows:
                        builder.add(*row)
                show(f"{counts['read']:,} examples")
        counts["cut"] += formatter.num_cut
        if not len(builder):
            is_cut = counts["cut"] or counts["long"]
            raise nothing_to_learn(name, counts["read"], self.data if is_cut else None)
        if sum(formatter.idle.counts().values()) >= counts["kept"]:
            raise DataError(
                f"data.{name}: no example teaches anything: {'; '.join(formatter.idle)}",
                hint="compare answers and data.max_length with `hetero check --show 3`",
            )
        return builder.build()

    def kept(
        self, batch: list[Record], formatter: Formatter, counts: Counter[str], packs: bool = False
    ) -> Iterator[tuple[Record, list[Tokens], Sequence[float]]]:
        """The records that teach something, with rows and targets; counts as `_tokenise` does. With
        `packs` rows are not cut, and rows without a label are kept, too."""
        most = None if packs else self.data.max_length
        made = zip(batch, formatter.rows(batch), formatter.targets(batch), strict=True)
        counts["read"] += len(batch)
        for record, rows, targets in made:
            given = [ids for ids, _ in rows[: len(rows) - formatter.label_rows]]
            for ids in given:
                if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
                    unknown = self.tokenizer.convert_ids_to_tokens(max(ids))
                    raise DataError(
                        f"{record.where}: token {unknown!r} has the id {max(ids)}, but the model"
                        f" has only {self.vocab_size} embeddings",
                        hint="tokenizer and model do not belong together; check model.tokenizer",
                    )
            for token in dict.fromkeys(chain.from_iterable(map(self._twice, given))):
                formatter.notes.add(_TWICE.format(token), record.where)
            if most is not None and any(len(ids) > most for ids, _ in rows):
                if formatter.keeps_whole:
                    counts["long"] += 1
                    continue
                counts["cut"] += 1
                part = kept_part(self.data)
                rows = [(ids[part], trained[part]) for ids, trained in rows]
            if formatter.teaches(rows) or (packs and rows[0][0]):
                counts["kept"] += 1
                formatter.judge(record, rows, targets)
                yield record, rows, targets
            else:
                counts["dropped"] += 1

    @cached_property
    def _ends(self) -> dict[int, str]:
        """Tokens for a beginning or an end, by id; kept since a tokenizer takes long to tell."""
        roles = (f"{role}_token" for role in _ENDS)
        found = {getattr(self.tokenizer, f"{r}_id"): getattr(self.tokenizer, r) for r in roles}
        return {token: name for token, name in found.items() if token is not None}

    def _twice(self, ids: list[int]) -> Iterator[str]:
        """Tokens for a beginning or an end that follow each other, white space aside. In a
        classifier's row only its ends count: a pair of texts may have two such tokens between."""
        anywhere, last = self.labels is None, len(ids) - 1
        for token, name in self._ends.items():
            if ids.count(token) < 2:
                continue
            for a, b in pairwise(k for k, each in enumerate(ids) if each == token):
                near = b - a <= _NEAR and (anywhere or a == 0 or b == last)
                if near and not str(self.tokenizer.decode(ids[a + 1 : b])).strip():
                    yield name
                    break

    def _remarks(self, counts: Counter[str], formatter: Formatter) -> Iterator[str]:
        yield from formatter.notes
        yield from (f"warning: {line}" for line in formatter.idle)
        if counts["cut"]:
            yield (
                f"{counts['cut']:,} of {counts['read']:,} examples were longer than "
                f"max_length={self.data.max_length} and were cut"
            )
        if counts["long"]:
            yield (
                f"{counts['long']:,} of {counts['read']:,} examples are longer than "
                f"max_length={self.data.max_length} and were left out"
            )
        if counts["dropped"]:
            yield (
                f"{counts['dropped']:,} of {counts['read']:,} examples have no token to learn from "
                "(empty, or only a prompt within max_length) and were left out"
            )
        if formatter.changed_prompts:
            yield (
                f"warning: {formatter.changed_prompts:,} prompts are tokenised differently when "
                "the completion follows; the completion begins where they part. End prompts at a "
                "word boundary"
            )
        renderer = formatter.renderer
        if renderer is None:
            return
        if renderer.trains_stop is False:
            yield (
                "warning: the chat template does not count the token that ends a turn as the "
                "assistant's, so the model may not learn to stop"
            )
        if renderer.uses_date:
            yield (
                "warning: the chat template writes today's date; to resume on another day fix it, "
                'for Llama 3 with data.chat_template_kwargs {"date_string": "26 Jul 2024"}'
            )
