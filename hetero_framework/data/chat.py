"""Conversations as tokens, with a mask of the tokens that the loss covers.

A template with `{% generation %}` marks the assistant's text itself. In any other template, the
loops over messages show the text of each message. The assistant's text is its turn without the
header that the generation prompt gives. Tokens and masks equal those of TRL's training templates.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from hetero_framework.data.conversations import Conversation, Message, Remarks
from hetero_framework.data.render_check import RenderCheck
from hetero_framework.data.sources import listed
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "SAID"  # a content to look for in the text
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_MASK_HINT = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the template, "
    "or set data.assistant_only_loss to false to train on the whole conversation"
)

# Errors that a template raises for a conversation that it does not take.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)

# Rules of TRL's training templates (1.16), each with the text by which a template is recognised.
_THINKS_LAST = "loop.index0 > ns.last_query_index"  # Qwen 3 to 3.8: thinks in the last turns only
_KEEP_THINKING = (
    (_THINKS_LAST, "loop.last or (not loop.last and reasoning_content)", "true"),
    (_THINKS_LAST, _THINKS_LAST, "true"),
    (  # DeepSeek R1 distils
        "set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='')",
        "{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}",
        "",
    ),
)
_HEADERS = {
    "{{- '<|im_start|>' + message.role }}": "<|im_start|>assistant",  # Qwen 2.5; \n is trained
    "<｜Assistant｜>": "",  # DeepSeek: the header is trained
    "<|start|>assistant": "",  # gpt-oss: the header begins each channel of a turn
}
_STOPS_AT_NEXT_ROLE = "[gMASK]<sop>"  # GLM: the next role's token ends a turn

_ROLE_TOKEN = re.compile(r"<\|(?:user|observation|system)\|>")
_BEGINS_TO_THINK = re.compile(r"[<\[◁][^\s<>\[\]]*think", re.IGNORECASE)

_NUMBER = "hetero_turn"  # the key that numbers a message

_MARK = "\ue000{loop}:{message}\ue001"
_MARKS = re.compile("\ue000(\\d+):(\\d*)\ue001")
# Comments, the ends of loops, their beginnings, and assignments of an item of a list by number.
_TAGS = re.compile(
    r"\{#.*?#\}"
    r"|\{%[-+]?\s*(?:(endfor)|for\s+([^%]+?)\s+in\b.*?|set\s+(\w+)\s*=\s*\w+\[\s*(\w+)\s*\])"
    r"\s*([-+]?%\})",
    re.DOTALL,
)

TokensAndMask = tuple[list[int], list[bool]]


class ChatRenderer:
    """Renders with a tokenizer's chat template and extra variables. Raises DataError without one.

    Args:
        assistant_only: The loss covers the assistant's messages, not the whole conversation.
        notes: Takes remarks on what the template leaves out.

    `trains_stop` says whether the first assistant mask covers the token that ends a turn (None: no
    mask yet). A model that is not trained on this token does not learn to stop.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None = None,
        *,
        assistant_only: bool = True,
        notes: Remarks | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.assistant_only = assistant_only
        chosen = tokenizer.chat_template
        if isinstance(chosen, dict):
            chosen = chosen.get("default")
        if not chosen:
            raise DataError(
                "the data are conversations, but the tokenizer has no chat template",
                hint="use the tokenizer of an instruction-tuned model (model.tokenizer), or give a "
                "Jinja file in data.chat_template_path",
            )
        self.trains_stop: bool | None = None
        self.marks_generation = _GENERATION.search(chosen) is not None
        if assistant_only and not self.marks_generation:
            known = [change[1:] for change in _KEEP_THINKING if change[0] in chosen]
            for written, instead in known:
                chosen = chosen.replace(written, instead)
        self.template: str = chosen
        self._with_marks = mark_turns(chosen)
        self._check = RenderCheck(self._apply, chosen, Remarks() if notes is None else notes)
        self._takes_parts = not self._shows(_PROBE) and self._shows(
            [{"type": "text", "text": _PROBE}]
        )

    def _shows(self, content: Any) -> bool:
        """Whether the template writes the text of a message with this content."""
        try:
            return _PROBE in self._render([{"role": "user", "content": content}])
        except _REFUSALS:
            return False

    @property
    def uses_date(self) -> bool:
        """Whether the template writes the current date, so that other days give other tokens."""
        return "strftime_now" in self.template

    def ids(self, chat: Conversation, *, generation_prompt: bool = False) -> list[int]:
        """Token ids of a conversation, as `apply_chat_template(tokenize=True)` gives them."""
        text = self._apply(chat, add_generation_prompt=generation_prompt)
        if not generation_prompt:
            self._check(chat)
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = found["input_ids"]
        return ids

    def _encoded_at(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a rendered text, and where in it each token begins and ends."""
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return found["input_ids"], found.encodings[0].offsets

    def ids_and_mask(self, chat: Conversation) -> TokensAndMask:
        """Token ids of a conversation and a mask of the tokens that the loss covers: the
        assistant's or all, but none of a message of weight 0."""
        weights = [bool(message.get("weight", 1)) for message in chat.messages]
        if not self.tokenizer.is_fast and (self.assistant_only or 0 in weights):
            raise DataError(
                "the assistant's tokens cannot be found with a tokenizer written in Python",
                hint="take one with tokenizer.json, or set data.assistant_only_loss to false",
            )
        wanted = [
            weight and (_is_assistants(message) or not self.assistant_only)
            for message, weight in zip(chat.messages, weights, strict=True)
        ]
        if self.assistant_only and not any(map(_is_assistants, chat.messages)):
            raise DataError(
                f"{chat.where}: no assistant message, so there is nothing to learn",
                hint="remove it, or set data.assistant_only_loss to false",
            )
        text = self._apply(chat)
        turns = self._turns(chat, text)
        self._check(chat)
        if self.assistant_only and not self.marks_generation:
            if _STOPS_AT_NEXT_ROLE in self.template:
                text, turns = _with_stops(chat.messages, text, turns)
            ids, mask = self._tokens_of(chat, text, turns, wanted)
        else:
            ids, mask = self._given(chat, text)
            if 0 in weights:
                _, out = self._tokens_of(chat, text, turns, [not weight for weight in weights])
                mask = [bit and not other for bit, other in zip(mask, out, strict=True)]
        if any(wanted) and not any(mask):
            raise DataError(
                f"{chat.where}: the chat template marks no token of the assistant",
                hint=_NO_MASK_HINT,
            )
        if self.trains_stop is None and self.assistant_only and any(mask):
            self.trains_stop = self._ends_with_special_token(ids, mask)
        return ids, mask

    def _ends_with_special_token(self, ids: list[int], mask: list[bool]) -> bool:
        """Whether the last trained token, white space aside, is one that can end a turn."""
        special = {self.tokenizer.eos_token_id, *self.tokenizer.get_added_vocab().values()}
        trained = [token for token, bit in zip(ids, mask, strict=True) if bit]
        ends = (token for token in reversed(trained) if str(self.tokenizer.decode([token])).strip())
        return next(ends, None) in special

    def _given(self, chat: Conversation, text: str) -> TokensAndMask:
        """Token ids, and a mask by the template's marks, or of all tokens."""
        if self.assistant_only:
            encoding = self._apply(
                chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return encoding["input_ids"], [bool(bit) for bit in encoding["assistant_masks"]]
        ids = self._encoded(text)
        return ids, [True] * len(ids)

    def _turns(self, chat: Conversation, text: str) -> list[list[range]]:
        """The characters of a rendered conversation that the template writes for each message. An
        end-of-sequence token after the last message belongs to that message."""
        messages = numbered(chat.messages)
        marked = self._apply(replace(chat, messages=messages), template=self._with_marks)
        rendered, turns = find_turns(marked, len(messages))
        if rendered != text:
            return [[] for _ in messages]
        if turns[-1] and text[turns[-1][-1].stop :] == self.tokenizer.eos_token:
            turns[-1][-1] = range(turns[-1][-1].start, len(text))
        return turns

    def _tokens_of(
        self, chat: Conversation, text: str, turns: list[list[range]], wanted: list[bool]
    ) -> TokensAndMask:
        """Token ids of a text, and a mask of the tokens in wanted messages. The mask covers a token
        across a message's border, too, as return_assistant_tokens_mask does."""
        ids, places = self._encoded_at(text)
        starts, ends = zip(*places, strict=True)
        mask = [False] * len(starts)
        for message, turn, is_wanted in zip(chat.messages, turns, wanted, strict=True):
            if is_wanted and not turn and message.get("content"):
                raise DataError(
                    f"{chat.where}: the chat template has no {{% generation %}} marks, and it does "
                    "not go over the messages in a loop, so the assistant's tokens cannot be told "
                    "apart",
                    hint=_NO_MASK_HINT,
                )
            for part in self._body(text, turn) if is_wanted and turn else ():
                first, end = bisect_right(ends, part.start), bisect_left(starts, part.stop)
                mask[first:end] = [True] * (end - first)
        return ids, mask

    def _body(self, text: str, turn: list[range]) -> list[range]:
        """A turn without its header, and without spaces behind the end-of-sequence token."""
        start, stop = turn[0].start, turn[-1].stop
        at = text.find(self._header, start, turn[0].stop) if self._header else -1
        if at >= 0:
            start = at + len(self._header)
        trimmed = text[:stop].rstrip(" ")
        if self.tokenizer.eos_token and trimmed.endswith(self.tokenizer.eos_token):
            stop = len(trimmed)
        return [range(max(start, part.start), min(stop, part.stop)) for part in turn]

    @cached_property
    def _header(self) -> str:
        """The text that the template writes before the assistant's text: the common beginning of
        the assistant's turns and the generation prompt, up to a tag that begins thinking."""
        for written, counted in _HEADERS.items():
            if written in self.template:
                return counted
        where = "an example of two questions and answers"
        asked = [{"role": "user", "content": "ASKED"}]
        answered = [*asked, {"role": "assistant", "content": _PROBE}]
        chat = Conversation([*answered, *answered], where)
        text = self._apply(chat)
        headers = [
            text[turn[0].start : turn[0].stop].partition(_PROBE)[0].lstrip()
            for turn in self._turns(chat, text)[1::2]
            if turn
        ]
        chat = Conversation(asked, where)
        text = self._apply(chat)
        before = "".join(text[: turn[-1].stop] for turn in self._turns(chat, text) if turn)
        prompted = self._apply(chat, add_generation_prompt=True)
        if prompted.startswith(before) and prompted != before:
            headers.append(prompted.removeprefix(before).lstrip())
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*headers, strict=False))
        common = "".join(letters[0] for letters in alike)
        return str(_BEGINS_TO_THINK.split(common)[0])

    def _apply(self, chat: Conversation, *, template: str | None = None, **options: Any) -> Any:
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in (map(_in_parts, chat.messages) if self._takes_parts else chat.messages)
        ]
        options = {**chat.arguments, **options}
        try:
            try:
                return self._render(messages, template, **options)
            except _REFUSALS:
                # Some templates take a call's arguments only as JSON text, some only as an object.
                others = [_with_other_arguments(message) for message in messages]
                if others == messages:
                    raise
                return self._render(others, template, **options)
        except _REFUSALS as error:
            raise DataError(
                f"{chat.where}: the chat template refused the conversation: {error}",
                hint="roles here: " + listed(message["role"] for message in chat.messages),
            ) from error

    def _render(self, messages: list[Message], template: str | None = None, **options: Any) -> Any:
        settings = {"tokenize": False, **self.template_kwargs, **options}
        return self.tokenizer.apply_chat_template(
            messages, chat_template=template or self.template, **settings
        )


def _is_assistants(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _with_other_arguments(message: Message) -> Message:
    """The message with the arguments of calls in the other form: JSON text or parsed."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            with suppress(json.JSONDecodeError):
                arguments = json.loads(arguments)
        changed = function if arguments is None else {**function, "arguments": arguments}
        calls.append(changed if function is call else {**call, "function": changed})
    return {**message, "tool_calls": calls} if calls else message


def _with_stops(
    messages: Sequence[Message], text: str, turns: list[list[range]]
) -> tuple[str, list[list[range]]]:
    """Text and turns with the role token that ends an assistant's turn; inserted where missing."""
    turns = [list(turn) for turn in turns]
    for number in reversed(range(len(messages))):
        if not _is_assistants(messages[number]) or not turns[number]:
            continue
        end = turns[number][-1].stop
        if token := _ROLE_TOKEN.match(text, end):
            stop = token[0]
        else:
            stop = "<|observation|>" if messages[number].get("tool_calls") else "<|user|>"
            text = text[:end] + stop + text[end:]
            turns[number + 1 :] = [
                [range(part.start + len(stop), part.stop + len(stop)) for part in turn]
                for turn in turns[number + 1 :]
            ]
        turns[number][-1] = range(turns[number][-1].start, end + len(stop))
    return text, turns


def _in_parts(message: Message) -> Message:
    """The message with its text as a list of parts, as templates of processors take it."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def mark_turns(template: str) -> str:
    """The template with a mark at the beginning of each message, and at the end of each loop.
    Apart from the marks, its text stays the same."""
    loops: list[tuple[int, str]] = []
    written: list[str] = []
    rest = 0
    for count, tag in enumerate(_TAGS.finditer(template)):
        ended, item, taken, index, close = tag.groups()
        mark = None
        if ended and loops:
            number, _ = loops.pop()
            mark = f"{{{{ '{_MARK.format(loop=number, message='')}' }}}}"
        elif item:
            loops.append((count, item))
            mark = _begin(count, item) if item.isidentifier() else None
        elif taken and loops and loops[-1][1] == index:
            mark = _begin(loops[-1][0], taken)
        if mark is not None:
            # A tag's closing decides on the white space after it: the endif closes like this tag.
            written += [template[rest : tag.start(5)], f"%}}{{% if true %}}{mark}{{% endif {close}"]
            rest = tag.end()
    return "".join([*written, template[rest:]])


def _begin(loop: int, variable: str) -> str:
    before, after = _MARK.format(loop=loop, message="\0").split("\0")
    shown = f"'{before}' ~ {variable}['{_NUMBER}'] ~ '{after}'"
    return f"{{{{ ({shown}) if {variable} is mapping and '{_NUMBER}' in {variable} }}}}"


def numbered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the numbers that a marked template writes."""
    return [{**message, _NUMBER: number} for number, message in enumerate(messages)]


def find_turns(marked: str, messages: int) -> tuple[str, list[list[range]]]:
    """A marked rendering without its marks, and the ranges of each message's characters."""
    text, *pieces = _MARKS.split(marked)
    turns: list[list[range]] = [[] for _ in range(messages)]
    inside: dict[str, int] = {}  # loop: message, the innermost loop last
    for loop, message, piece in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        inside.pop(loop, None)
        if message:
            inside[loop] = int(message)
        end = len(text) + len(piece)
        if inside and piece:
            turn = turns[next(reversed(inside.values()))]
            if turn and turn[-1].stop == len(text):
                turn[-1] = range(turn[-1].start, end)
            else:
                turn.append(range(len(text), end))
        text += piece
    return text, [
        [part for part in turn if not text[part.start : part.stop].isspace()] for turn in turns
    ]
