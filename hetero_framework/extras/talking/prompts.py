"""Prompts: texts and conversations that a model is to continue, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.config import Config, DataConfig
from hetero_framework.config.objectives import shows_pictures
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.conversations import CONVERSATION_FIELDS, Message, check_media
from hetero_framework.data.formats import alpaca_prompt, parts, string_field
from hetero_framework.data.kinds import TEXT, ExampleKind, formatter_for, kind_of
from hetero_framework.data.sources import Record, find_sources, listed, read_file
from hetero_framework.data.splits import SplitReader
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Given = str | Sequence[str | Sequence[dict[str, Any]]]
_CHATS = ("messages", "conversations")
_HINT = "give a prompt (a text or messages), messages, or instruction and input"


@dataclass(frozen=True)
class Prompt:
    """A prompt: its end as people read it, and all of its token ids."""

    text: str
    ids: tuple[int, ...]
    seen: MicroBatch = field(default_factory=dict)
    """The model's inputs for its pictures, beside the ids."""
    pictures: tuple[str, ...] = ()
    """Small copies of its pictures, as data URLs."""


class PromptReader:
    """Makes prompts of records. With `chat` a plain text is what a user says, else it is continued
    as it stands. `sees`: the kind of examples with pictures, and what is beside them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig | None,
        *,
        chat: bool,
        sees: tuple[ExampleKind, Any] | None = None,
    ) -> None:
        self._tokenizer, self.is_chat, self._sees = tokenizer, chat, sees is not None
        self._field = data.dataset_text_field if data is not None else "text"
        template = data.chat_template_kwargs if data is not None else None
        # Options of the data that are about the loss have no part here.
        options = DataConfig(train="-", format="messages", chat_template_kwargs=template)
        kind, *beside = sees or (TEXT,)
        self._formatter: Any = kind.formatter(Record("", {}), tokenizer, options, *beside)

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptReader:
        """The reader for the model of a configuration."""
        sees, chat = None, is_chat(config, tokenizer)
        if shows_pictures(name := config.training.data_kind) and (beside := kind_of(name).beside):
            sees = kind_of(name), beside(config, tokenizer)
        return cls(tokenizer, config.data, chat=chat, sees=sees)

    def read(self, given: Given, base_dir: Path, setting: str) -> list[Prompt]:
        """The prompts of a file (its lines or records), or of a list. Raises DataError for an entry
        that is no prompt."""
        if isinstance(given, str):
            try:
                sources = find_sources(given, base_dir)
            except DataError as error:
                hint = 'a prompt itself stands in a list or a file: ["..."]'
                raise DataError(f"{setting}: {error.message}", hint=hint) from error
            if strange := [source.name for source in sources if not source.is_file]:
                raise DataError(f"{setting}: {strange[0]} is no file of prompts", hint=_HINT)
            records = [record for source in sources for record in read_file(source)]
        else:
            records = [
                Record(f"{setting}[{k}]", {"prompt": item if isinstance(item, str) else [*item]})
                for k, item in enumerate(given)
            ]
        return [self(record) for record in records]

    def __call__(self, record: Record) -> Prompt:
        fields = {name: value for name, value in record.fields.items() if value is not None}
        record = Record(record.where, fields)
        if self._sees:
            record = self._formatter.see(record)
        for name in ("prompt", *_CHATS):
            if isinstance(fields.get(name), list):
                _refuse_lost(record, name, *CONVERSATION_FIELDS)
                return self._conversation(record, name)
        if "instruction" in fields:
            _refuse_lost(record, "instruction", "input")
            return self._plain(alpaca_prompt(record), string_field(record, "instruction"))
        named = [name for name in ("prompt", self._field) if name in fields]
        if not named:
            shown = listed(fields)
            raise DataError(f"{record.where}: no prompt among its fields: {shown}", hint=_HINT)
        text = string_field(record, named[0])
        _refuse_lost(record, "prompt", self._field, *CONVERSATION_FIELDS * self.is_chat)
        if not self.is_chat:
            return self._plain(text, text)
        beside = {name: fields[name] for name in CONVERSATION_FIELDS if name in fields}
        said = {"prompt": [{"role": "user", "content": text}], **beside}
        return self._conversation(Record(record.where, said), "prompt")

    def prompt_of(self, messages: Sequence[Message], pictures: Sequence[str] = ()) -> Prompt:
        """The prompt for the next message of a conversation with these files of pictures; without a
        template its last text. Raises DataError for pictures that cannot be shown."""
        if pictures and not (self._sees and self.is_chat):
            why = "has no chat template" if self._sees else "was not trained with any"
            hint = "--set training.objective=image-text-to-text shows them to a model that sees"
            raise DataError(f"the model is shown no picture: it {why}", hint=hint)
        if not self.is_chat:
            return self._plain(messages[-1]["content"], messages[-1]["content"])
        fields = {"prompt": [*messages], **({"images": [*pictures]} if pictures else {})}
        return self(Record("the conversation", fields))

    def _conversation(self, record: Record, name: str) -> Prompt:
        """The prompt of a conversation, without the answers at its end."""
        reader = self._formatter.reader
        chat = reader.with_system(reader.read(record, name), record)
        messages = list(chat.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise DataError(f"{record.where}: {name} has only messages of the assistant")
        chat = replace(chat, messages=messages)
        ids = self._formatter.chat.ids(chat, generation_prompt=True)
        return self._prompt(str(messages[-1].get("content", "")), ids)

    def _prompt(self, text: str, ids: Sequence[int]) -> Prompt:
        if not self._sees:
            return Prompt(text, tuple(ids))
        shown = text.replace(self._formatter.mark, "").strip()
        return Prompt(shown, tuple(ids), *self._formatter.seen(ids))

    def _plain(self, text: str, shown: str) -> Prompt:
        if self._sees:
            text = self._formatter.chat.expanded(text)
        ids = self._tokenizer(text, verbose=False)["input_ids"]
        eos = self._tokenizer.eos_token_id
        if len(ids) > 1 and ids[-1] == eos and not text.endswith(str(self._tokenizer.eos_token)):
            ids = ids[:-1]  # the tokenizer ends each text
        return self._prompt(shown, ids)


def _refuse_lost(record: Record, *used: str) -> None:
    """Raise DataError for a field with a part of the prompt that would not be used."""
    check_media(record.fields, record.where)
    for name, is_repeated in parts(record, used):
        if not is_repeated:
            hint = "put its text into the prompt, or remove it; " + _HINT
            raise DataError(f"{record.where}: the field {name} would not be read", hint=hint)


def is_chat(config: Config, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model of this run is talked to: it has a template, and its training data are
    conversations, as far as they can be read here."""
    if not tokenizer.chat_template:
        return False
    if config.data is None:
        return True
    data = config.data.parts[0]
    try:
        reader = SplitReader(data.train_split, ("train",), data.dataset_config, data.columns)
        first = next(reader.read(find_sources(data.paths, config.base_dir), lambda note: None))
        kind = formatter_for("text", first, tokenizer, data).name
    except DataError:  # no longer here, or Megatron's
        return data.format in ("auto", "messages")
    spoken = kind == "prompt_completion" and any(
        isinstance(first.fields.get(name), list) for name in ("prompt", "completion")
    )
    return kind == "messages" or spoken


def check_prompts(prompts: Sequence[Prompt], max_positions: int | None, setting: str) -> None:
    """Raise DataError for a prompt that is empty or leaves no room for a token."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt.ids:
            raise DataError(f"{setting}: prompt {number} has no tokens", hint="give it a text")
        if max_positions is not None and len(prompt.ids) >= max_positions:
            raise DataError(
                f"{setting}: prompt {number} has {len(prompt.ids)} tokens, and the model has"
                f" {max_positions} positions",
                hint="shorten it",
            )
