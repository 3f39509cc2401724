"""Conversations: the messages of an example, checked and brought into OpenAI's layout.

Other layouts are read where their meaning is certain: from/value and the roles of ShareGPT, calls
written as text, content in parts. Everything that the chat template leaves out is reported or
refused.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any

from hetero_framework.config.strict_json import json_type
from hetero_framework.data.files.json_lines import json_value
from hetero_framework.data.sources import Record, check_unicode, listed, shorten
from hetero_framework.errors import DataError

Message = dict[str, Any]

# Names of roles, in lower case with underscores, by the role that they mean.
_ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "bot", "chatbot", "model", "ai", "chatgpt"),
    "system": ("system", "developer"),
    "tool": (
        *("tool", "observation", "ipython", "function", "tool_response", "function_response"),
        *("tool_result", "function_result", "tool_output", "function_output"),
    ),
    "call": ("function_call", "tool_call"),  # an assistant's message; its text is the call
}
_MEANING = {name: role for role, names in _ROLES.items() for name in names}
_SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
CONVERSATION_FIELDS = (*_SYSTEM_FIELDS, "tools", "functions", "chat_template_kwargs")
"""Fields of an example beside its messages."""
_MASKS = ("loss", "train", "training", "trainable", "mask", "masked")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_NOT_SAID = ("role", "from", "type", "weight")
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_OF_CHAT = re.compile(r"\s*\[\s*\{\s*['\"](role|from|content|value)['\"]\s*:")
_REMARKS = 20  # most remarks that are shown
_WRAPPED = re.compile(r"\s*<(tool_\w+)>(.*)</\1>\s*", re.DOTALL)
_MESSAGE_HINT = 'a message is {"role": "user", "content": "..."}'


@dataclass(frozen=True)
class Conversation:
    """Checked messages, their place in the data, and variables for the template. A message whose
    `weight` is 0 is not trained."""

    messages: list[Message]
    where: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Remarks:
    """Remarks about examples. Each has its number of examples and the place of the first."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, str]] = {}

    def add(self, remark: str, where: str) -> None:
        count, first = self._entries.get(remark, (0, where))
        self._entries[remark] = count + 1, first

    def counts(self) -> Counter[str]:
        return Counter({remark: count for remark, (count, _) in self._entries.items()})

    def __iter__(self) -> Iterator[str]:
        entries = list(self._entries.items())
        for remark, (count, first) in entries[:_REMARKS]:
            yield f"{remark} (first {first}, {count:,} in all)"
        if len(entries) > _REMARKS:
            yield f"and {len(entries) - _REMARKS:,} more remarks of this kind"


class ConversationReader:
    """Reads the conversations of one run, which are rendered with `template`."""

    def __init__(self, template: str, notes: Remarks) -> None:
        self.template = template
        self.notes = notes
        self._names_role = cache(self._search_role)

    def read(self, record: Record, name: str) -> Conversation:
        """Read the messages of the field `name`, and the template's variables beside them. Null
        keys are left out: in rows of Parquet every message has every key."""
        value = record.fields[name]
        if not isinstance(value, list) or not value:
            actual = "an empty list" if value == [] else json_type(value)
            raise DataError(
                f"{record.where}: {name} must be a list of messages, found {actual}",
                hint=_MESSAGE_HINT,
            )
        messages = [
            self._message(item, f"{record.where}: {name}[{i}]") for i, item in enumerate(value)
        ]
        return Conversation(messages, record.where, self._arguments(record))

    def with_system(self, chat: Conversation, record: Record) -> Conversation:
        """The conversation, begun with the system prompt if a field of the record holds one."""
        messages = chat.messages
        for name in _SYSTEM_FIELDS:
            text = record.fields.get(name)
            if text in (None, ""):
                continue
            if not isinstance(text, str):
                raise DataError(
                    f"{record.where}: the field {name} must be a string, found {json_type(text)}"
                )
            check_unicode(text, f"{record.where}: the field {name}")
            if messages[0]["role"] != "system":
                messages = [{"role": "system", "content": text}, *messages]
            elif messages[0].get("content", "").strip() != text.strip():
                raise DataError(
                    f"{record.where}: the field {name} and the conversation's first message are two"
                    " different system prompts",
                    hint="keep one of them",
                )
        arguments = chat.arguments
        listed = "<tools>" in (messages[0].get("content") or "") and "<tools>" in self.template
        if messages[0]["role"] == "system" and listed and arguments.pop("tools", None):
            text = "the system prompt lists tools; those beside it are not written again"
            self.notes.add(text, chat.where)
        return Conversation(messages, chat.where, arguments)

    def _message(self, item: Any, where: str) -> Message:
        if not isinstance(item, dict):
            raise DataError(
                f"{where} must be an object, found {json_type(item)}", hint=_MESSAGE_HINT
            )
        message = _named(item)
        if not isinstance(message.get("role"), str):
            raise DataError(
                f"{where} has no role; its fields are {listed(item)}", hint=_MESSAGE_HINT
            )
        _check_weight(message, where)
        check_media(message, where)
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], where)
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise DataError(f"{where}: content must be a string, found {json_type(content)}")
        self._set_role(message, where)
        _set_calls(message, where)
        self._unwrap(message, where)
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"{where} has no content")
        for text in message.values():
            if isinstance(text, str):
                check_unicode(text, where)
        return message

    def _set_role(self, message: Message, where: str) -> None:
        """Give the role OpenAI's name, unless the template knows the name in the data."""
        role = message["role"]
        meaning = _meaning(role)
        text = message.get("content", "")
        if meaning == "call" or (role == "function" and _calls(text) is not None):
            if meaning != "call":
                raise DataError(
                    f"{where}: the role function has a call as its text; it is read as a result",
                    hint='give calls the role "function_call" and results the role "tool"',
                )
            message["role"] = "assistant"
            if (calls := _calls(text)) is not None and "tool_calls" in self.template:
                del message["content"]
                message["tool_calls"] = calls
        elif meaning == "assistant" or not self._names_role(role):
            message["role"] = meaning or role
        if meaning is None and not self._names_role(role):
            self.notes.add(
                f"warning: the role {shorten(role)!r} is not known here or by the chat template; "
                "its messages are rendered as they are and not trained",
                where,
            )

    def _unwrap(self, message: Message, where: str) -> None:
        """Remove tags around a tool's answer if the template writes them, too. Raises DataError for
        calls that would be written twice."""
        content = message.get("content") or ""
        if "tool_calls" in message and "<tool_call>" in content:
            raise DataError(
                f"{where} has its calls twice: as text (<tool_call>) and in tool_calls",
                hint="keep one of them",
            )
        if _MEANING.get(message["role"].strip().lower()) == "tool":
            wrapped = _WRAPPED.fullmatch(content)
            if wrapped is not None and f"<{wrapped[1]}>" in self.template:
                message["content"] = wrapped[2].strip("\n")

    def _search_role(self, role: str) -> bool:
        """Whether the template asks for a role of this name."""
        return re.search(rf"role[^%{{}}]*['\"]{re.escape(role)}['\"]", self.template) is not None

    def variables(self, value: Any, prefix: str, where: str) -> dict[str, Any]:
        """Check and return `chat_template_kwargs`. Error messages begin with `prefix`."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise DataError(
                f"{prefix}chat_template_kwargs must be an object, found {json_type(value)}",
                hint='it holds variables of the chat template, such as {"enable_thinking": false}',
            )
        for name in value:
            if name in _reserved():
                raise DataError(
                    f"{prefix}chat_template_kwargs: {name} is not a variable of chat templates",
                    hint="it would change how the template is applied, which is fixed here",
                )
            if not has_word(self.template, name):
                self.notes.add(
                    f"warning: chat_template_kwargs: the chat template does not use {name}", where
                )
        return dict(value)

    def _arguments(self, record: Record) -> dict[str, Any]:
        """Variables for the template: `chat_template_kwargs`, and `tools` or OpenAI's older
        `functions`, whose lists may be JSON text."""
        fields, where = record.fields, record.where
        arguments = self.variables(fields.get("chat_template_kwargs"), f"{where}: ", where)
        tools = _json_list(fields.get("tools"), f"{where}: the field tools")
        functions = _json_list(fields.get("functions"), f"{where}: the field functions")
        if bool(tools) + bool(functions) + ("tools" in arguments) > 1:
            raise DataError(f"{where}: has tools in two places", hint="keep one of them")
        tools = tools or [{"type": "function", "function": function} for function in functions]
        if tools:
            arguments["tools"] = tools
        return arguments


def as_messages(record: Record, *answers: str) -> Record:
    """The record with prompt and answers as messages, if one of them is messages already. A text
    becomes a message of the user or the assistant. Without a prompt, `messages` that wait for an
    answer are the prompt, as in LLaMA-Factory. A prompt that a single answer repeats is taken off
    the answer. If several answers repeat the prompt, or no prompt is given, all messages that the
    answers begin with alike become the prompt, as in TRL."""
    fields = {name: value for name, value in record.fields.items() if value is not None}
    for name in ("messages", "conversations"):
        chat = fields.get(name)
        waits = isinstance(chat, list) and bool(chat) and _said(chat[-1])["role"] != "assistant"
        if waits and not fields.get("prompt"):
            fields["prompt"] = fields.pop(name)
    given = {name: fields[name] for name in ("prompt", *answers) if name in fields}
    for name, value in given.items():
        if isinstance(value, str) and _TEXT_OF_CHAT.match(value):
            raise DataError(
                f"{record.where}: {name} is messages written as one text",
                hint="make a list of it, as json.loads does; " + _MESSAGE_HINT,
            )
    if not any(isinstance(value, (list, dict)) for value in given.values()):
        return record
    for name, value in given.items():
        if isinstance(value, str):
            role = "user" if name == "prompt" else "assistant"
            value = [{"role": role, "content": value}] if value or role == "assistant" else []
        fields[name] = [value] if isinstance(value, dict) else value
    if not all(isinstance(fields.get(name), list) for name in answers):
        return Record(record.where, fields)  # refused when the fields are read
    asked, *chats = ([*map(_said, fields.get(name, ()))] for name in ("prompt", *answers))
    most = min(map(len, chats)) - 1
    alike = next((k for k in range(most) if any(c[k] != chats[0][k] for c in chats)), most)
    first = sum(1 for _ in takewhile(lambda turn: turn.get("role") == "system", chats[0][:alike]))
    for begin in (0, first):
        end = begin + len(asked)
        if chats[0][begin:end] == asked and end <= alike:
            end = alike if len(answers) > 1 else end
            fields["prompt"] = fields[answers[0]][:end] or fields.get("prompt", [])
            fields |= {name: fields[name][end:] for name in answers}
            break
    return Record(record.where, fields)


def is_blank(value: Any) -> bool:
    """Whether a text, a message or a list of these says nothing."""
    if isinstance(value, dict):
        return all(is_blank(part) for name, part in value.items() if name not in _NOT_SAID)
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list) and all(map(is_blank, value)))


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a field: a text, or the texts of messages, of parts, or of pairs of turns."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict):
        yield from texts_of([value.get(name) for name in ("content", "value", "text")])
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)


def _named(item: Message) -> Message:
    """The message without null keys, with `from` called role and `value` called content."""
    message = {key: value for key, value in item.items() if value is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in message and theirs in message:
            message[ours] = message.pop(theirs)
    return message


def _meaning(role: str) -> str | None:
    return _MEANING.get(re.sub(r"[\s-]", "_", role.strip().lower()))


def _said(item: Any) -> Message:
    """The message in a form in which two messages that say the same are equal."""
    message = _named(item) if isinstance(item, dict) else {"content": item}
    role, content = str(message.get("role")), message.get("content")
    return {**message, "role": _meaning(role) or role, "content": " ".join(texts_of(content))}


def has_word(template: str, word: str) -> bool:
    """Whether a template uses this name of a variable or field."""
    return re.search(rf"\b{re.escape(word)}\b", template) is not None


@cache
def _reserved() -> frozenset[str]:
    """Names that no variable may have: they are parameters of `apply_chat_template`."""
    from transformers import PreTrainedTokenizerBase

    apply = PreTrainedTokenizerBase.apply_chat_template
    parameters = set(inspect.signature(apply).parameters) - {"tools", "documents", "kwargs"}
    return frozenset({*parameters, "messages", "conversations"})


def _check_weight(message: Message, where: str) -> None:
    for name in _MASKS:
        if name in message:
            raise DataError(
                f"{where} has the field {name}, which is not known here",
                hint='to leave a message of the assistant untrained, give it "weight": 0',
            )
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        actual = json_type(weight) if isinstance(weight, (bool, list, dict, str)) else weight
        raise DataError(
            f"{where}: weight must be 0 or 1, found {actual}",
            hint="0 leaves a message of the assistant untrained, 1 is the same as no weight",
        )


def check_media(fields: dict[str, Any], where: str) -> None:
    """Raise DataError for pictures, videos and sound."""
    for name in _MEDIA:
        if fields.get(name):
            is_rated = {"completion", "label"} <= fields.keys()
            other = "image-kto" if is_rated else "image-text-to-text"
            other = "image-dpo" if "rejected" in fields else other
            shown = f'set "training.objective": "{other}", or ' * name.startswith("image")
            raise DataError(
                f"{where} has the field {name}; only text can be trained on",
                hint=f"{shown}remove these examples, or the field where the text does not need it",
            )


def _joined(parts: list[Any], where: str) -> str:
    """The text of content in parts."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            actual = f"of the type {kind!r}" if kind is not None else json_type(part)
            raise DataError(
                f"{where} has content that is not text: content[{index}] is {actual}",
                hint='only text can be trained on: {"type": "text", "text": "..."}',
            )
        texts.append(text)
    return "".join(texts)


def _set_calls(message: Message, where: str) -> None:
    """Turn tool calls, or OpenAI's older `function_call`, into a list of objects."""
    if "function_call" in message:
        call = message.pop("function_call")
        if not isinstance(call, dict) or "tool_calls" in message:
            raise DataError(f"{where}: function_call must be an object, and the only call")
        message["tool_calls"] = [{"type": "function", "function": call}]
        if not message.get("content"):
            message.pop("content", None)
    if "tool_calls" not in message:
        return
    calls = _json_list(message["tool_calls"], f"{where}: tool_calls")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: tool_calls[{index}] has no function with a name",
                hint='a call is {"type": "function", "function": {"name": "f", "arguments": {}}}',
            )
    message["tool_calls"] = calls
    if not calls:
        del message["tool_calls"]


def _calls(text: str) -> list[Message] | None:
    """The calls in the text of ShareGPT's function_call message; None for any other text."""
    try:
        value = json_value(text, "")
    except DataError:
        return None
    calls = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if set(call) not in ({"name", "arguments"}, {"name", "parameters"}):
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = json_value(arguments, "")
            except DataError:
                return None
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"type": "function", "function": function})
    return calls or None


def _json_list(value: Any, where: str) -> list[Any]:
    """The list that `value` is, or is the JSON text of; an empty list for an empty value."""
    if isinstance(value, str) and value.strip():
        value = json_value(value, where)
    if not value and not isinstance(value, (bool, int, float)):
        return []
    if not isinstance(value, list):
        raise DataError(f"{where} must be a list, found {json_type(value)}")
    return value
