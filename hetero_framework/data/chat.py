"""Conversations: rendering them, and which tokens are the assistant's.

A template with `{% generation %}` marks them itself. For any other the conversation is rendered up
to each assistant turn: where the whole begins with that, the assistant's text is what follows the
generation prompt; where it does not, that is an error, not a guess.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from hetero_framework.data.conversations import Conversation, Message
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_MASK_HINT = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the template, "
    "or set data.assistant_only_loss to false to train on the whole conversation"
)

# What a template raises that does not take a conversation.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)

TokensAndMask = tuple[list[int], list[bool]]


class ChatRenderer:
    """The chat template of one tokenizer, with extra variables. Raises DataError without one.

    `trains_stop` says, once an assistant mask was made, whether the first one holds the token that
    ends a turn; without it a model does not learn to stop.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        chosen = template or tokenizer.chat_template
        if isinstance(chosen, dict):
            chosen = chosen.get("default")
        if not chosen:
            raise DataError(
                "the data are conversations, but the tokenizer has no chat template",
                hint="use the tokenizer of an instruction-tuned model (model.tokenizer), or give a "
                "Jinja file in data.chat_template_path",
            )
        self.template: str = chosen
        self.trains_stop: bool | None = None
        self.marks_generation = _GENERATION.search(chosen) is not None
        self._takes_parts = not self._shows("x") and self._shows([{"type": "text", "text": "x"}])

    def _shows(self, content: Any) -> bool:
        """Whether the template writes the text of such a message."""
        try:
            empty, full = (
                self._render([{"role": "user", "content": written}])
                for written in (content[:0], content)
            )
        except _REFUSALS:
            return False
        return len(full) > len(empty)

    @property
    def uses_date(self) -> bool:
        """Whether the template writes the current date, so that other days give other tokens."""
        return "strftime_now" in self.template

    def ids(self, chat: Conversation, *, generation_prompt: bool = False) -> list[int]:
        """Token ids of a conversation, as `apply_chat_template(tokenize=True)` gives them."""
        text = self._apply(chat, tokenize=False, add_generation_prompt=generation_prompt)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def ids_and_mask(self, chat: Conversation) -> TokensAndMask:
        """Token ids of a conversation and, for each, whether the assistant wrote it."""
        if not self.tokenizer.is_fast:
            raise DataError(
                "the assistant's tokens cannot be found with a tokenizer written in Python",
                hint="take one with tokenizer.json, or set data.assistant_only_loss to false",
            )
        if not any(message["role"] == "assistant" for message in chat.messages):
            raise DataError(
                f"{chat.where}: no assistant message, so there is nothing to learn",
                hint="remove it, or set data.assistant_only_loss to false",
            )
        ids, mask = self._marked(chat) if self.marks_generation else self._derived(chat)
        if not any(mask):
            raise DataError(
                f"{chat.where}: the chat template marks no token of the assistant",
                hint=_NO_MASK_HINT,
            )
        if self.trains_stop is None:
            self.trains_stop = self._ends_with_special_token(ids, mask)
        return ids, mask

    def _ends_with_special_token(self, ids: list[int], mask: list[bool]) -> bool:
        """Whether the last trained token, white space aside, is one that can end a turn."""
        special = {self.tokenizer.eos_token_id, *self.tokenizer.get_added_vocab().values()}
        trained = [token for token, bit in zip(ids, mask, strict=True) if bit]
        ends = (token for token in reversed(trained) if str(self.tokenizer.decode([token])).strip())
        return next(ends, None) in special

    def _marked(self, chat: Conversation) -> TokensAndMask:
        encoding = self._apply(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoding["input_ids"], [bool(bit) for bit in encoding["assistant_masks"]]

    def _derived(self, chat: Conversation) -> TokensAndMask:
        text = self._apply(chat, tokenize=False)
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        mask = [False] * len(encoding["input_ids"])
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            # As return_assistant_tokens_mask: a token that the span touches counts. Characters that
            # a tokenizer drops have no token.
            for character in self._turn(chat, index, text):
                token = encoding.char_to_token(character)
                if token is not None:
                    mask[token] = True
        return encoding["input_ids"], mask

    def _turn(self, chat: Conversation, index: int, text: str) -> range:
        """The characters of `text` that the assistant wrote in message `index`."""
        earlier = replace(chat, messages=chat.messages[:index])
        before = self._apply(earlier, tokenize=False, add_generation_prompt=True) if index else ""
        until = self._apply(replace(chat, messages=chat.messages[: index + 1]), tokenize=False)
        if not text.startswith(until):
            # Some templates close every rendering with the end-of-sequence token.
            until = until.removesuffix(self.tokenizer.eos_token or "")
        if not (text.startswith(until) and until.startswith(before) and len(before) < len(until)):
            raise DataError(
                f"{chat.where}: the chat template has no {{% generation %}} marks, and it renders"
                " this conversation's beginning differently when more follows, so the assistant's"
                " tokens cannot be told apart",
                hint=_NO_MASK_HINT,
            )
        return range(len(before), len(until))

    def _apply(self, chat: Conversation, **options: Any) -> Any:
        messages = map(_in_parts, chat.messages) if self._takes_parts else chat.messages
        try:
            return self._render(list(messages), **chat.arguments, **options)
        except _REFUSALS as error:
            raise DataError(
                f"{chat.where}: the chat template refused the conversation: {error}",
                hint="roles here: " + ", ".join(message["role"] for message in chat.messages),
            ) from error

    def _render(self, messages: list[Message], **options: Any) -> Any:
        settings = {"tokenize": False, **self.template_kwargs, **options}
        return self.tokenizer.apply_chat_template(messages, chat_template=self.template, **settings)


def _in_parts(message: Message) -> Message:
    """The message as templates of processors take it."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
