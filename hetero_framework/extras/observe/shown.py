"""The first examples as a run reads them: tokens, the part in the loss, and everything left out."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from hetero_framework.config import Config, DataConfig
from hetero_framework.data.formats import Formatter
from hetero_framework.data.kinds import formatter_for, kind_of
from hetero_framework.data.rendered import LEFT_OUT
from hetero_framework.data.sources import Record, find_sources, listed
from hetero_framework.data.splits import SplitReader
from hetero_framework.data.train_data import kept_part, load_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Shown:
    """One example. `pieces` are the texts of its tokens, those of one letter together, and whether
    the loss covers them; `trained` counts the tokens that it covers."""

    where: str
    tokens: int
    trained: int
    pieces: Pieces
    left_out: list[str]


def shown_examples(config: Config, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Shown]:
    """The first `count` examples of `data.train`. Raises what `load_data` raises for them."""
    data = config.data
    if data is None or count < 1:
        return []
    if data.packing:
        packed: Any = load_data(config, tokenizer).examples
        return [_packed(packed, k, tokenizer) for k in range(min(count, len(packed)))]
    if data.streaming:
        with closing(load_data(config, tokenizer)) as stream:
            return [_row(stream.examples, k, tokenizer) for k in range(count)]
    labels = None
    if kind_of(config.training.data_kind).labels is not None:
        labels = load_data(config, tokenizer, most=count).labels
    each = max(1, count // len(data.parts))
    named = [(f"{source.label}: ", source.max_samples or each) for source in data.sources]
    return [
        replace(shown, where=name + shown.where)
        for (name, most), part in zip(named or [("", each)], data.parts, strict=True)
        for shown in _of_source(config, part, tokenizer, min(each, most), labels)
    ]


def _of_source(
    config: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, count: int, labels: Any
) -> list[Shown]:
    """The first examples of one source."""
    sources = find_sources(data.paths, config.base_dir)
    if any(source.is_parted for source in sources):
        rows: Any = load_data(config, tokenizer).examples
        return [_row(rows, k, tokenizer) for k in range(min(count, len(rows)))]
    kind = config.training.data_kind
    about = data.dataset_config, data.columns, kind_of(kind).numeric
    reader = SplitReader(data.train_split, ("train",), *about)
    records = kind_of(kind).records(reader.read(sources, lambda note: None))
    chosen = list(islice(records, count))
    formatter = formatter_for(kind, chosen[0], tokenizer, data, labels)
    return [shown for record in chosen for shown in _views(record, formatter, tokenizer, data)]


def _row(rows: Any, number: int, tokenizer: PreTrainedTokenizerBase) -> Shown:
    ids, labels = (part.tolist() for part in rows[number])
    trained = [label >= 0 for label in labels]
    return Shown(rows.where(number), len(ids), sum(trained), _pieces(tokenizer, ids, trained), [])


def _packed(rows: Any, number: int, tokenizer: PreTrainedTokenizerBase) -> Shown:
    """A packed row, with a bar where one example ends and the next begins."""
    pieces: Pieces = []
    parts = [(ids.tolist(), labels >= 0) for ids, labels in rows.pieces(number)]
    for ids, trained in parts:
        pieces += [(" | ", False)] * bool(pieces) + _pieces(tokenizer, ids, trained.tolist())
    tokens, learned = sum(len(ids) for ids, _ in parts), sum(int(bits.sum()) for _, bits in parts)
    where = f"packed row {number + 1} of {len(rows):,}, {len(parts)} examples"
    return Shown(where, tokens, learned, pieces, [])


def _views(
    record: Record, formatter: Formatter, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> list[Shown]:
    """Each row of an example."""
    left_out = []
    before = formatter.notes.counts()
    [rows] = formatter.rows([record])
    if unused := [name for name in record.fields if name in formatter.unused]:
        left_out.append("the fields " + listed(unused))
    for remark in formatter.notes.counts() - before:
        left_out.append(remark.removeprefix(LEFT_OUT).removeprefix("warning: "))
    part = kept_part(data)
    cut = [(ids[part], trained[part]) for ids, trained in rows]
    if formatter.keeps_whole and cut != rows:
        left_out.append("the whole example: it is longer than data.max_length")
    elif not formatter.teaches(cut):
        left_out.append("the whole example: no token of it has a part in the loss")
    found = []
    for (ids, _), (kept, mask) in islice(
        zip(rows, cut, strict=True), len(rows) - formatter.label_rows
    ):
        lost = list(left_out)
        if len(kept) < len(ids):
            lost.append(f"{len(ids) - len(kept):,} of {len(ids):,} tokens (data.max_length)")
        pieces = _pieces(tokenizer, kept, mask)
        found.append(Shown(record.where, len(kept), sum(mask), pieces, lost))
    return found


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: list[bool]) -> Pieces:
    if not tokenizer.is_fast:
        texts = tokenizer.convert_ids_to_tokens(ids)
        return list(zip(map(str, texts), trained, strict=True))
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    pieces: Pieces = []
    covered = False
    for token, bit in zip(ids, trained, strict=True):
        covered |= bit
        text = stream.step(tokenizer.backend_tokenizer, token)
        if text is not None:  # a letter may take several tokens
            pieces.append((text, covered))
            covered = False
    return pieces
