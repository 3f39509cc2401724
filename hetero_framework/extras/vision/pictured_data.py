"""Texts with pictures, as TRL's SFTTrainer (1.16) reads them.

A picture stands where a message has the part {"type": "image"}; without such parts, all stand
before the user's first message. The chat template writes a placeholder there, and the model's
processor says which tokens take its place.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.chat import ChatRenderer, TokensAndMask
from hetero_framework.data.conversations import (
    CONVERSATION_FIELDS,
    Conversation,
    ConversationReader,
    Message,
    as_messages,
)
from hetero_framework.data.examples import Examples
from hetero_framework.data.formats import Formatter, Tokens, common, string_field
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError
from hetero_framework.extras.vision.pictures import PictureStore, pictures_of
from hetero_framework.models.cut.objectives import next_token
from hetero_framework.units import plural

__all__ = ["PICTURED", "next_token"]  # the objective is that of texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("images", "image")
_MARK = "\ue002"  # stands for a picture in a message's text, until the template is applied
_PART = '{"type": "image"}'
_SPANS = "return_assistant_tokens_mask"
_ANSWERS = ("completion", "chosen", "rejected")


class PictureReader(ConversationReader):
    """Reads messages in which a mark stands for each picture."""

    pictures = 0
    """The number of pictures that the example has."""

    def read(self, record: Record, name: str) -> Conversation:
        chat = super().read(record, name)
        texts = [message.get("content", "") for message in chat.messages]
        if name not in _ANSWERS and not any(_MARK in text for text in texts):
            asked = next((m for m in chat.messages if m["role"] == "user"), None)
            if asked is not None:
                asked["content"] = _MARK * self.pictures + asked.get("content", "")
        return chat

    def _message(self, item: Any, where: str) -> Message:
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            item = {**item, "content": [_marked(part, where) for part in item["content"]]}
        return super()._message(item, where)


def _marked(part: Any, where: str) -> Any:
    """A part of a message's content; that of a picture as a text with a mark."""
    if not isinstance(part, dict) or part.get("type") != "image":
        return part
    if given := sorted(key for key, value in part.items() if key != "type" and value is not None):
        raise DataError(
            f"{where} has a picture in it ({given[0]})",
            hint=f"put pictures into the column images, and the part {_PART} where each stands",
        )
    return {"type": "text", "text": _MARK}


class PictureRenderer(ChatRenderer):
    """Renders conversations with pictures; `given` are the texts of their tokens, in order."""

    placeholder, where = "", ""
    given: Sequence[str] = ()

    def show(self, placeholder: str, given: Sequence[str], where: str) -> None:
        """Render an example with these pictures from now on."""
        self.placeholder, self.given, self.where = placeholder, given, where

    def expanded(self, text: str) -> str:
        """A rendered text with the pictures' tokens. Raises DataError unless it has as many
        placeholders as there are pictures."""
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != (count := len(self.given)):
            raise DataError(
                f"{self.where}: {plural(count, 'picture')}, and {plural(len(pieces) - 1, 'place')}"
                f" for {'it' if count == 1 else 'them'}",
                hint=f"give each picture one part {_PART} of a message, and write no"
                f" {self.placeholder} in texts",
            )
        return "".join(_alternating(pieces, self.given))

    def text(self, chat: Conversation, **how: Any) -> str:
        """A rendered conversation, in which all is written."""
        text: str = self._apply(chat, **how)
        self._check(chat)
        return text

    def apart(self, prompt: str, answers: Sequence[str]) -> list[list[int]]:
        """Token ids of a rendered prompt with pictures, and of each text behind it."""
        for answer in answers:
            self.expanded(prompt + answer)  # or raises for a picture in the answer
        return [self._encoded(prompt), *map(super()._encoded, answers)]

    def _encoded(self, text: str) -> list[int]:
        return super()._encoded(self.expanded(text))

    def _encoded_at(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Places count in the text with placeholders."""
        ids, places = super()._encoded_at(self.expanded(text))
        back = _places_before(text.split(self.placeholder), self.placeholder, self.given)
        return ids, [(back(begin)[0], back(end)[1]) for begin, end in places]

    def _given(self, chat: Conversation, text: str) -> TokensAndMask:
        if not self.assistant_only:
            return super()._given(chat, text)
        how: dict[str, Any] = {_SPANS: True}
        spans = self._apply(chat, **how)
        ids, places = self._encoded_at(text)
        starts, ends = [begin for begin, _ in spans], [end for _, end in spans]
        # As the processor does: any token that overlaps a marked span.
        return ids, [bisect_left(starts, end) > bisect_right(ends, begin) for begin, end in places]

    def _render(self, messages: list[Message], template: str | None = None, **options: Any) -> Any:
        messages = [*map(_in_parts, messages)]
        if not options.pop(_SPANS, False):
            return super()._render(messages, template, **options)
        how = {**self.tokenizer.special_tokens_map, **self.template_kwargs, **options, _SPANS: True}
        return render_jinja_template([messages], chat_template=self.template, **how)[1][0]


def _alternating(pieces: Sequence[Any], between: Sequence[Any]) -> list[Any]:
    """The pieces, with one thing between each two of them."""
    pairs = zip(pieces, between, strict=False)
    return [thing for pair in pairs for thing in pair] + [pieces[-1]]


def _places_before(
    pieces: Sequence[str], placeholder: str, given: Sequence[str]
) -> Callable[[int], tuple[int, int]]:
    """A function from a place in an expanded text to the place before the expansion, twice; inside
    a picture's tokens, to the beginning and the end of the placeholder."""
    lengths = [len(text) for text in _alternating(pieces, given)]
    before = [len(text) for text in _alternating(pieces, [placeholder] * len(given))]
    ends, starts = [*accumulate(lengths)], [0, *accumulate(before)]

    def back(place: int) -> tuple[int, int]:
        number = bisect_left(ends, place)
        into = place - (ends[number] - lengths[number])
        if into == lengths[number]:
            return (starts[number + 1],) * 2
        if number % 2:
            return starts[number], starts[number + 1]
        return (starts[number] + into,) * 2

    return back


def _in_parts(message: Message) -> Message:
    """The message with its content in parts, as processors' templates take it."""
    content = message.get("content")
    if isinstance(content, list):  # one part of text
        content = content[0]["text"]
    if content is None:
        return message
    pieces = [{"type": "text", "text": text} for text in content.split(_MARK)]
    parts = _alternating(pieces, [{"type": "image"}] * (len(pieces) - 1))
    kept = [part for part in parts if part.get("text") != ""]
    return {**message, "content": kept or parts}


class PictureFormatter(Formatter):
    """Tokenises texts with pictures; the last targets of an example are the number of its first
    picture and how many it has."""

    renders, reads, mark = PictureRenderer, PictureReader, _MARK

    def __init__(
        self,
        first: Record,
        tokenizer: PreTrainedTokenizerBase,
        options: DataConfig,
        pictures: PictureStore,
    ) -> None:
        name: str = options.format
        super().__init__(self.told(first) if name == "auto" else name, tokenizer, options)
        self._pictures, self._numbers = pictures, list[tuple[int, int]]()
        if options.truncation_mode == "keep_end":
            raise DataError(
                "data.truncation_mode keep_end would cut pictures off, which stand at the start",
                hint="leave it out",
            )
        if options.assistant_only_loss and self.name == "prompt_completion":
            raise DataError(
                "data.assistant_only_loss is true, but the data are prompts and completions",
                hint="it needs messages; leave it out otherwise",
            )

    def told(self, first: Record) -> str:
        """The format that the first example tells."""
        return "messages" if first.fields.get("prompt") is None else "prompt_completion"

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        self._numbers = []
        return [self._shown(record) for record in records]

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        return [*self._numbers]

    def see(self, record: Record) -> Record:
        """Show the pictures of an example from now on. Returns the example without them."""
        first, fields = len(self._pictures), dict(record.fields)
        given = [picture for name in COLUMNS for picture in _listed(fields.pop(name, None))]
        tokens = [self._pictures.add(picture, record.where) for picture in given]
        chat, reader = cast(PictureRenderer, self.chat), cast(PictureReader, self.reader)
        chat.show(self._pictures.placeholder, tokens, record.where)
        reader.pictures = len(given)
        self._numbers.append((first, len(given)))
        return Record(record.where, fields)

    def seen(self, ids: Sequence[int]) -> tuple[MicroBatch, tuple[str, ...]]:
        """The inputs of the model for the pictures that are shown, in a text of these tokens; and
        small copies of them."""
        first, count = self._numbers[-1]
        numbers = range(first, first + count)
        ids_1S = torch.tensor([ids])
        batch = {"input_ids": ids_1S, "attention_mask": torch.ones_like(ids_1S)}
        made = self._pictures.inputs([numbers], batch) if count else {}
        return made, tuple(map(self._pictures.small, numbers))

    def _shown(self, record: Record) -> list[Tokens]:
        rows = self.made(self.see(record))
        most = self.options.max_length
        if most is not None and any(self._pictures.cut_by(ids, most) for ids, _ in rows):
            raise DataError(
                f"{record.where}: a picture would be cut: the example has {len(rows[0][0])} tokens,"
                f" and data.max_length is {most}",
                hint="raise data.max_length, or take smaller pictures",
            )
        return rows

    def made(self, record: Record) -> list[Tokens]:
        """The rows of an example whose pictures are shown."""
        if self.name == "messages":
            return [self._whole(record)]
        asked, ids = self.apart(as_messages(record, "completion"), "completion")
        only = self.options.completion_only_loss is not False
        return [([*asked, *ids], [not only] * len(asked) + [True] * len(ids))]

    def apart(self, record: Record, *names: str) -> list[list[int]]:
        """Token ids of the prompt and of the answers under these names, tokenised one by one, as
        TRL does where there are pictures."""
        chat = cast(PictureRenderer, self.chat)
        if self._are_messages(record, names[0]):
            self.use(record, "prompt", *names, *CONVERSATION_FIELDS)
            prompt, dialogues = self._dialogues(record, *names)
            begun, whole = (
                chat.text(prompt, add_generation_prompt=True),
                [*map(chat.text, dialogues)],
            )
            same = min(common(begun, text) for text in whole)
            return chat.apart(begun[:same], [text[same:] for text in whole])
        self.use(record, "prompt", *names)
        begun, *answers = (string_field(record, name) for name in ("prompt", *names))
        return chat.apart(begun, [*map(self._with_eos, answers)])


def _listed(value: Any) -> list[Any]:
    """The pictures of a column: a list, one, or none."""
    return value if isinstance(value, list) else [] if value is None else [value]


@dataclass(frozen=True, kw_only=True)
class PicturedRows(Examples):
    """Rows with pictures. `shown`: each example's number of the first picture, and of pictures."""

    shown: np.ndarray
    pictures: PictureStore

    def numbers(self, index: int) -> range:
        """The numbers of the pictures of an example."""
        first, count = map(int, self.shown[index])
        return range(first, first + count)

    @cached_property
    def seen(self) -> np.ndarray:
        """The tokens of the pictures of each row."""
        return np.add.reduceat(self.pictures.marks(self.ids), self.offsets[:-1])

    def most_seen(self, count: int) -> np.ndarray:
        """The `count` examples with the most tokens of pictures."""
        most = self.seen.reshape(len(self.shown), -1).max(axis=1)
        return np.argsort(most, kind="stable")[-count:]

    def soon(self, batches: Sequence[np.ndarray]) -> None:
        """Prepare the pictures of these micro-batches ahead of time, and no others."""
        self.pictures.soon([[self.numbers(int(row)) for row in rows] for rows in batches])

    def close(self) -> None:
        """Prepare no more."""
        self.pictures.close()

    @cached_property
    def fingerprint(self) -> str:
        """As of texts, with the pictures' contents."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for index in range(len(self.shown)):
            pictures = [self.pictures.digest(number) for number in self.numbers(index)]
            digest.update(b"".join([len(pictures).to_bytes(4, "little"), *pictures]))
        return digest.hexdigest()


def with_pictures(
    examples: Examples, data: DataConfig, training: TrainingConfig, pictures: PictureStore
) -> PicturedRows:
    """The rows that PictureFormatter made, with their pictures."""
    parts = examples.ids, examples.trained, examples.offsets
    assert examples.targets is not None
    others, shown = examples.targets[:, :-2], examples.targets[:, -2:]
    targets = others if others.size else None
    return PicturedRows(*parts, targets, shown=shown, pictures=pictures)


def counted(examples: PicturedRows, training: TrainingConfig) -> Iterator[str]:
    """A line on the pictures of the training data."""
    counts = examples.shown[:, 1].astype(int)
    yield f"train: {plural(counts.sum(), 'picture')}, at most {counts.max()} in an example"
    if examples.pictures.is_deep:
        yield "warning: some pictures have 16 bits a colour: what is above 255 is white in training"
    for whose, tokens in (("an example", examples.lengths), ("its pictures", examples.seen)):
        least, mean, most = tokens.min(), tokens.mean(), tokens.max()
        yield f"train: tokens of {whose}: least {least:,}, mean {mean:,.0f}, most {most:,}"


def collate_pictures(
    examples: PicturedRows,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    multiple: int | None,
) -> MicroBatch:
    """`collate`, and what the processor makes of the pictures of all rows."""
    batch = collate(examples, indices, pad_token_id, multiple)
    numbers = [examples.numbers(int(index)) for index in indices]
    return batch | examples.pictures.inputs(numbers, batch)


PICTURED = ExampleKind(
    "texts with pictures",
    ("messages", "prompt_completion"),
    PictureFormatter,
    with_pictures,
    collate_pictures,
    needs=(COLUMNS, ("messages", "conversations", "prompt")),
    beside=pictures_of,
    remarks=counted,
)
