"""Checks that everything in a conversation appears in the text that the chat template writes.

Templates drop roles, tool calls and keys that they do not know. So a conversation of each shape is
rendered once more with a mark in each of its texts, and the marks are looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hetero_framework.data.conversations import Conversation, Message, Remarks, has_word
from hetero_framework.errors import DataError

_THINKING = "</think>"
_PASSED_OVER = {"role", "tool_call_id", "id", "weight"}  # say nothing to be learned
_CONTENT, _CALLS = "content", "tool calls"  # parts that must not be lost
_BESIDE = "text beside tool calls"


LEFT_OUT = "warning: the chat template leaves out "
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
_QUOTED = (
    "warning: the chat template writes the arguments of tool calls as quoted text, because they are"
    " JSON text in the data; as objects they are written as JSON"
)


_Lost = tuple[int | None, str]


class RenderCheck:
    """Checks the conversations of one run; `render` turns a conversation into text."""

    def __init__(
        self, render: Callable[[Conversation], str], template: str, notes: Remarks
    ) -> None:
        self.render = render
        self.template = template
        self.notes = notes
        self._seen: dict[Any, list[_Lost]] = {}

    def __call__(self, chat: Conversation) -> None:
        """Note the parts of the conversation that the template leaves out. Raises DataError where a
        tool call or the content of a message is left out."""
        shape = _shape(chat)
        if shape not in self._seen:
            self._seen[shape] = self._lost(chat)
        for index, part in self._seen[shape]:
            if index is not None:
                role = chat.messages[index]["role"]
                raise DataError(
                    f"{chat.where}: the chat template leaves out the {part} of message {index + 1} "
                    f"(role {role})",
                    hint="use the roles and fields that the template writes, or set another "
                    "template (data.chat_template_path)",
                )
            self.notes.add(LEFT_OUT + part if part != _QUOTED else part, chat.where)

    def _lost(self, chat: Conversation) -> list[_Lost]:
        """The lost parts, each with its message's number, or None where it may be lost."""
        marks: dict[str, _Lost] = {}
        messages = [_Marker(index, marks).message(item) for index, item in enumerate(chat.messages)]
        text = self.render(chat)
        try:
            marked = self.render(replace(chat, messages=messages))
            lost = [place for mark, place in marks.items() if mark not in marked]
        except DataError:  # the template refuses texts with marks
            lost = [
                (index, _CONTENT)
                for index, message in enumerate(chat.messages)
                if not _is_in(message.get("content", ""), text)
            ]
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                arguments = call.get("function", call).get("arguments")
                quoted = json.dumps(arguments, ensure_ascii=False)
                if isinstance(arguments, str) and quoted in text:
                    lost.append((None, _QUOTED))
            for key in message.keys() - _PASSED_OVER - {"content", "tool_calls"}:
                if not isinstance(message[key], str) and not has_word(self.template, key):
                    lost.append((None, f"the field {key} of messages"))
        others = {key: value for key, value in chat.arguments.items() if key != "tools"}
        with suppress(DataError):  # a template that needs tools
            if "tools" in chat.arguments and self.render(replace(chat, arguments=others)) == text:
                lost.append((None, "tools"))
        return list(dict.fromkeys(lost))


class _Marker:
    """Puts marks into the texts of a message and keeps their meanings."""

    def __init__(self, index: int, marks: dict[str, _Lost]) -> None:
        self.index, self.marks = index, marks

    def message(self, message: Message) -> Message:
        marked = dict(message)
        for key, value in message.items():
            if key == "tool_calls":
                marked[key] = [self._call(call) for call in value]
            elif key == "content" and isinstance(value, str):
                thinking, end, answer = value.rpartition(_THINKING)
                if thinking.strip():
                    thinking = self._marked(thinking, "thinking")
                answer = self._marked(answer, _BESIDE if message.get("tool_calls") else _CONTENT)
                marked[key] = thinking + end + answer
            elif key == "name" and message["role"] == "tool":
                continue  # it says which call is answered
            elif isinstance(value, str) and key not in _PASSED_OVER:
                name = "thinking" if key in _THINKING_KEYS else f"the field {key} of messages"
                marked[key] = self._marked(value, name)
        return marked

    def _call(self, call: Message) -> Message:
        function = dict(call.get("function", call))
        function["name"] = self._marked(function["name"], _CALLS)
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            mark = self._mark(_CALLS)
            function["arguments"] = {**arguments, mark: mark}
        elif isinstance(arguments, str):
            mark = self._mark(_CALLS)
            with suppress(ValueError, TypeError):
                arguments = json.dumps({**json.loads(arguments), mark: mark}, ensure_ascii=False)
            function["arguments"] = arguments if mark in arguments else arguments + mark
        return {**call, "function": function} if "function" in call else function

    def _marked(self, text: str, part: str) -> str:
        """The text with a mark at its end, before a closing tag."""
        if not text.strip():
            return text
        tag = re.search(r"</[^<>]*>\s*$", text)
        end = tag.start() if tag else len(text)
        return text[:end] + self._mark(part) + text[end:]

    def _mark(self, part: str) -> str:
        mark = f"Mark{len(self.marks)}End"
        self.marks[mark] = self.index if part in (_CONTENT, _CALLS) else None, part
        return mark


def _shape(chat: Conversation) -> Any:
    """All of a conversation but its texts. It decides what a template leaves out."""
    messages = tuple(
        (
            message["role"],
            frozenset(key for key, value in message.items() if value),
            _THINKING in message.get("content", ""),
            tuple(type(_arguments(call)) for call in message.get("tool_calls", ())),
        )
        for message in chat.messages
    )
    others = {key: value for key, value in chat.arguments.items() if key != "tools"}
    return messages, "tools" in chat.arguments, json.dumps(others, sort_keys=True, default=str)


def _arguments(call: Message) -> Any:
    return call.get("function", call).get("arguments")


def _is_in(content: Any, text: str) -> bool:
    if not isinstance(content, str):
        return True
    return content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
