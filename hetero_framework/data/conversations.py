"""Conversations: the messages of an example, read and checked, in the layout of OpenAI."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hetero_framework.config.strict_json import json_type
from hetero_framework.data.sources import check_unicode
from hetero_framework.errors import DataError

Message = dict[str, Any]
_ROLES = {"human": "user", "gpt": "assistant"}  # the names of the from/value (ShareGPT) layout


@dataclass(frozen=True)
class Conversation:
    """Checked messages, where they stand, and what an example passes to the template."""

    messages: list[Message]
    where: str
    arguments: dict[str, Any] = field(default_factory=dict)


def read_conversation(fields: dict[str, Any], field: str, where: str) -> Conversation:
    """The messages of one field, checked, with the arguments beside them. Null keys are left out:
    in rows of Parquet every message has every key."""
    value = fields[field]
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else json_type(value)
        raise DataError(
            f"{where}: {field} must be a list of messages, found {found}",
            hint='a message is {"role": "user", "content": "..."}',
        )
    messages = [_message(item, f"{where}: {field}[{i}]") for i, item in enumerate(value)]
    return Conversation(messages, where, _template_arguments(fields, where))


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{where} must be an object, found {json_type(item)}")
    message = {key: value for key, value in item.items() if value is not None}
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise DataError(
            f"{where} has no role; its fields are {', '.join(item) or 'none'}",
            hint='a message is {"role": "user", "content": "..."}',
        )
    content = message.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            check_unicode(part["text"], where)
    if content is None and "tool_calls" not in message:
        raise DataError(f"{where} has no content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise DataError(f"{where} has content that is not text; only text can be trained on")
    elif content is not None and not isinstance(content, str):
        raise DataError(f"{where}: content must be a string, found {json_type(content)}")
    return message


def _template_arguments(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`tools` (or its JSON text) and `chat_template_kwargs` of an example, for the template."""
    arguments = dict(fields.get("chat_template_kwargs") or {})
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: the field tools is not JSON ({error.msg})") from error
    if tools:
        arguments["tools"] = tools
    return arguments
