"""The formats that TRL users know, turned into token ids and a mask of what the loss covers.

    text               {"text": ...}                            every token
    prompt_completion  {"prompt": ..., "completion": ...}       the completion
    messages           {"messages": [{"role", "content"}, ..]}  the assistant's turns
    alpaca             {"instruction", "input", "output"}       the output

Token ids and labels equal those of TRL's SFTTrainer (1.16): the end-of-sequence token is appended
unless it is there, prompts are tokenised together with their completions, and what is longer than
`max_length` loses its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hetero_framework.config import DataConfig
from hetero_framework.config.strict_json import json_type
from hetero_framework.data.chat import ChatRenderer
from hetero_framework.data.conversations import Conversation, read_conversation
from hetero_framework.data.sources import Record, check_unicode
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The prompts of tatsu-lab/stanford_alpaca, train.py; the output follows without a space.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)

_FORMATS_HINT = (
    "formats are text; prompt and completion; messages; instruction, input and output; "
    "rename the fields, or set data.dataset_text_field for plain text under another name"
)

Tokens = tuple[list[int], list[bool]]


def detect_format(fields: dict[str, Any], where: str, text_field: str) -> str:
    """The format of an example by the names of its fields; DataError when none fits."""
    if "prompt" in fields and "completion" in fields:
        return "prompt_completion"
    if "messages" in fields or "conversations" in fields:
        return "messages"
    if "instruction" in fields and "output" in fields:
        return "alpaca"
    if text_field in fields:
        return "text"
    raise DataError(
        f"{where}: the format cannot be told from the fields {', '.join(fields) or '(none)'}",
        hint=_FORMATS_HINT,
    )


class Formatter:
    """Tokenises examples of one format."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        options: DataConfig,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.options = options
        self.changed_prompts = 0
        self.renderer: ChatRenderer | None = None
        """Once an example needed it."""
        self._conversational: bool | None = None
        for option, without, needed in (
            ("completion_only_loss", ("text", "messages"), "prompt and completion"),
            ("assistant_only_loss", ("text", "alpaca"), "conversations"),
        ):
            if getattr(options, option) and name in without:
                raise DataError(
                    f"data.{option} is true, but the data have the format {name}",
                    hint=f"it needs {needed}; leave it out otherwise",
                )

    @property
    def chat(self) -> ChatRenderer:
        if self.renderer is None:
            only = self.options.assistant_only_loss
            self.renderer = ChatRenderer(
                self.tokenizer,
                self.options.chat_template_kwargs,
                assistant_only=self.name == "messages" if only is None else only,
            )
        return self.renderer

    def __call__(self, records: list[Record]) -> list[Tokens]:
        """Token ids and trained-token mask of each record, not yet truncated."""
        return _FORMATS[self.name](self, records)

    def _text(self, records: list[Record]) -> list[Tokens]:
        field = self.options.dataset_text_field
        texts = [self._with_eos(string_field(record, field)) for record in records]
        return [(ids, [True] * len(ids)) for ids in self._tokenize(texts)]

    def _alpaca(self, records: list[Record]) -> list[Tokens]:
        return self._pairs(
            [(alpaca_prompt(record), string_field(record, "output")) for record in records]
        )

    def _prompt_completion(self, records: list[Record]) -> list[Tokens]:
        if self._conversational is None:  # the first example of a run decides for all
            self._conversational = isinstance(_field(records[0], "prompt"), list)
        if self._conversational:
            return [self._conversational_pair(record) for record in records]
        return self._pairs(
            [(string_field(each, "prompt"), string_field(each, "completion")) for each in records]
        )

    def _pairs(self, pairs: list[tuple[str, str]]) -> list[Tokens]:
        if self.options.assistant_only_loss:
            raise DataError(
                "data.assistant_only_loss is true, but prompt and completion are plain strings",
                hint="it needs conversations; leave it out otherwise",
            )
        prompts = self._tokenize([prompt for prompt, _ in pairs])
        wholes = self._tokenize([prompt + self._with_eos(answer) for prompt, answer in pairs])
        return [
            (whole, self._completion_mask(prompt, whole))
            for prompt, whole in zip(prompts, wholes, strict=True)
        ]

    def _conversational_pair(self, record: Record) -> Tokens:
        prompt = _conversation(record, "prompt")
        messages = prompt.messages + _conversation(record, "completion").messages
        whole = replace(prompt, messages=messages)
        prompt_ids = self.chat.ids(prompt, generation_prompt=True)
        ids, assistant = self.chat.ids_and_mask(whole)
        mask = self._completion_mask(prompt_ids, ids)
        return ids, [a and b for a, b in zip(mask, assistant, strict=True)]

    def _messages(self, records: list[Record]) -> list[Tokens]:
        found = []
        for record in records:
            field = "messages" if "messages" in record.fields else "conversations"
            chat = _conversation(record, field)
            found.append(self.chat.ids_and_mask(chat))
        return found

    def _completion_mask(self, prompt: list[int], whole: list[int]) -> list[bool]:
        """The completion begins where prompt and prompt + completion part, as in TRL."""
        pairs = zip(prompt, whole, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.changed_prompts += same < len(prompt)
        if self.options.completion_only_loss is False:
            return [True] * len(whole)
        return [False] * same + [True] * (len(whole) - same)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, verbose=False)["input_ids"]

    def _with_eos(self, text: str) -> str:
        if not self.options.add_eos:
            return text
        eos = self.tokenizer.eos_token
        if not eos:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so an example would have no end",
                hint="set data.eos_token to one of its tokens, or data.add_eos to false",
            )
        return text if text.endswith(eos) else text + eos


_FORMATS: dict[str, Callable[[Formatter, list[Record]], list[Tokens]]] = {
    "text": Formatter._text,
    "prompt_completion": Formatter._prompt_completion,
    "messages": Formatter._messages,
    "alpaca": Formatter._alpaca,
}


def alpaca_prompt(record: Record) -> str:
    """Stanford's prompt for one example; an empty or absent input takes the shorter one."""
    instruction = string_field(record, "instruction")
    if record.fields.get("input") in (None, ""):
        return ALPACA_WITHOUT_INPUT.format(instruction=instruction)
    return ALPACA_WITH_INPUT.format(instruction=instruction, input=string_field(record, "input"))


def string_field(record: Record, name: str) -> str:
    """The text under `name`; DataError when it is absent, not a string or not valid Unicode."""
    value = _field(record, name)
    if not isinstance(value, str):
        raise DataError(
            f"{record.where}: the field {name} must be a string, found {json_type(value)}"
        )
    return check_unicode(value, f"{record.where}: the field {name}")


def _conversation(record: Record, field: str) -> Conversation:
    _field(record, field)
    return read_conversation(record.fields, field, record.where)


def _field(record: Record, name: str) -> Any:
    if name not in record.fields:
        seen = ", ".join(record.fields) or "none"
        raise DataError(f"{record.where}: no field {name}; its fields are {seen}")
    return record.fields[name]
