"""The first examples as a run reads them: tokens, the part in the loss, and everything left out."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from hetero_framework.config import Config, DataConfig
from hetero_framework.data.formats import Formatter
from hetero_framework.data.kinds import formatter_for
from hetero_framework.data.render_check import LEFT_OUT
from hetero_framework.data.sources import Record, find_sources, listed
from hetero_framework.data.train_data import Reader, kept_part, load_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Shown:
    """One example. `pieces` are the texts of its tokens, each with whether the loss covers it;
    tokens of one letter are one piece. `trained` counts the tokens that the loss covers."""

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
        return [_packed(packed, k, tokenizer, data) for k in range(min(count, len(packed)))]
    if data.streaming:
        with closing(load_data(config, tokenizer)) as stream:
            rows: Any = stream.examples
            return [_row(rows, k, tokenizer, data) for k in range(min(count, len(rows)))]
    reader = Reader(data, config.base_dir, tokenizer, None, [], training=config.training)
    reader.prepare(config)
    numbers: Any = [None] * len(data.parts)
    if data.val_set_size is not None or data.mixing == "interleave":
        numbers = reader.mixed().numbers_of_sources
    each = max(1, count // len(data.parts))
    names = [f"{source.label}: " for source in data.sources] or [""]
    return [
        replace(shown, where=name + shown.where)
        for name, part, taken in zip(names, reader.parts(), numbers, strict=True)
        for shown in _of_source(config, part, min(each, part.limit or each), taken)
    ]


def _of_source(config: Config, reader: Reader, count: int, taken: Any) -> list[Shown]:
    """The first examples of one source that the run reads. `taken` has their numbers, counted among
    examples that teach something (None: all). Examples that teach nothing are shown too."""
    data, tokenizer = reader.data, reader.tokenizer
    if any(source.is_parted for source in find_sources(data.paths, config.base_dir)):
        rows: Any = load_data(config, tokenizer).examples
        return [_row(rows, k, tokenizer, data) for k in range(min(count, len(rows)))]
    records = reader.kind.records(reader.records())
    first = next(records)
    formatter = formatter_for(config.training.data_kind, first, tokenizer, data, reader.more)
    found: list[Shown] = []
    shown = number = 0
    for record in chain([first], records):
        is_kept, views = _views(record, formatter, reader)
        if not is_kept or taken is None or number in taken:
            found += views
            shown += 1
        if shown == count:
            break
        number += is_kept
    return found


def _row(rows: Any, number: int, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Shown:
    ids, labels = (part.tolist() for part in rows[number])
    trained = _in_loss([label >= 0 for label in labels], data)
    return Shown(rows.where(number), len(ids), sum(trained), _pieces(tokenizer, ids, trained), [])


def _packed(rows: Any, number: int, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Shown:
    """A packed row, with a bar where one example ends and the next begins."""
    pieces: Pieces = []
    parts = [
        (ids.tolist(), _in_loss((labels >= 0).tolist(), data))
        for ids, labels in rows.pieces(number)
    ]
    for ids, trained in parts:
        pieces += [(" | ", False)] * bool(pieces) + _pieces(tokenizer, ids, trained)
    tokens, learned = sum(len(ids) for ids, _ in parts), sum(sum(bits) for _, bits in parts)
    where = f"packed row {number + 1} of {len(rows):,}, {len(parts)} examples"
    return Shown(where, tokens, learned, pieces, [])


def _in_loss(trained: list[bool], data: DataConfig) -> list[bool]:
    """`trained`, but False for the first token if examples share a row: it has no label there."""
    return [False, *trained[1:]] if data.one_row and trained else trained


def _views(record: Record, formatter: Formatter, reader: Reader) -> tuple[bool, list[Shown]]:
    """Whether a run takes an example, and the example's rows: of a pair both, of a rated answer the
    row with its own prompt."""
    data, tokenizer = reader.data, reader.tokenizer
    left_out = []
    before, num_cut = formatter.notes.counts(), formatter.num_cut
    [rows] = formatter.rows([record])
    if formatter.num_cut > num_cut:
        left_out.append("what the tokenizer cut off (data.max_length)")
    if unused := [name for name in record.fields if name in formatter.unused]:
        left_out.append("the fields " + listed(unused))
    for remark in formatter.notes.counts() - before:
        left_out.append(remark.removeprefix(LEFT_OUT).removeprefix("warning: "))
    part = kept_part(data)
    cut = [(ids[part], trained[part]) for ids, trained in rows]
    is_whole = not (formatter.keeps_whole and cut != rows)
    is_kept = is_whole and formatter.teaches(cut)
    if not is_whole:
        left_out.append("the whole example: it is longer than data.max_length")
    elif not is_kept:
        left_out.append("the whole example: no token of it has a part in the loss")
    found = []
    for (ids, _), (kept, mask) in islice(zip(rows, cut, strict=True), len(formatter.answers) or 1):
        if formatter.label_rows:
            mask = cut[-1][1]
        elif reader.labels is not None:  # the mask marks second texts
            mask = [False] * len(kept)
        mask = _in_loss(mask, data)
        lost = list(left_out)
        if len(kept) < len(ids):
            lost.append(f"{len(ids) - len(kept):,} of {len(ids):,} tokens (data.max_length)")
        pieces = _pieces(tokenizer, kept, mask)
        found.append(Shown(record.where, len(kept), sum(mask), pieces, lost))
    return is_kept, found


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
