"""Rows of other programs' data, written anew in a format of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetero_framework.config.problems import shown
from hetero_framework.data.formats import ALPACA_WITH_INPUT, ALPACA_WITHOUT_INPUT
from hetero_framework.errors import UserError
from hetero_framework.extras.convert.convert import Rewrite

Row = Mapping[str, Any]
# Roles of LLaMA-Factory's tags; those of its default tags are read as they are.
_TAGS = {
    **{"user": "user", "assistant": "assistant", "system": "system"},
    **{"observation": "tool", "function": "tool_call"},
}


def new_row(row: Row, file: Rewrite) -> dict[str, Any]:
    """A row as `file` has it written. Raises UserError for one without the fields that it needs."""
    try:
        made = _STYLES[file.style](row, file.entry)
        if file.form == "messages" and "completion" in made:
            asked = filter(None, (row.get("instruction"), row.get("input")))
            prompt = "\n".join(asked) if file.style == "alpaca" else ""
            turns = [*_turn("user", prompt), *_turn("assistant", made["completion"])]
            return {"messages": turns}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        text = f"{file.source}: a row is not as its description says: {error!r}: {shown(row)}"
        raise UserError(text) from error
    return {name: value for name, value in made.items() if value is not None}


def _turn(role: str, content: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}] if content else []


def _said(turns: Any, names: Mapping[str, str], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages with the fields and roles that are read here."""
    made = [{names.get(name, name): value for name, value in turn.items()} for turn in turns]
    made = [{**turn, "role": roles.get(turn["role"], turn["role"])} for turn in made]
    return [{**t, "weight": int(t["weight"])} if t.get("weight") is not None else t for t in made]


def as_messages(row: Row, entry: Row) -> dict[str, Any]:
    """A row of LLaMA-Factory's data, as its entry in dataset_info.json describes it: an instruction
    and its input are one turn of the user, with a line break between."""
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    beside = {name: row.get(columns.get(name, "")) or None for name in ("system", "tools")}
    is_alpaca, ranked = entry.get("formatting", "alpaca") == "alpaca", entry.get("ranking")
    content = tags.get("content_tag", "value")
    if is_alpaca:
        turns = list(_instruction(row, columns, answered=not ranked))
    else:
        names = {tags.get("role_tag", "from"): "role", content: "content"}
        roles = {str(tags.get(f"{tag}_tag")): role for tag, role in _TAGS.items()}
        turns = _said(row[columns.get("messages", "conversations")], names, roles)
    if ranked:
        answers = {side: row[columns.get(side, side)] for side in ("chosen", "rejected")}
        texts = {s: answer if is_alpaca else answer[content] for s, answer in answers.items()}
        rated = {s: [{"role": "assistant", "content": text}] for s, text in texts.items()}
        return {**beside, "prompt": turns, **rated}
    if tag := columns.get("kto_tag"):
        rest = {"completion": turns[-1:], "label": bool(row[tag])}
        return {**beside, "prompt": turns[:-1], **rest}
    return {**beside, "messages": turns}


def _instruction(row: Row, columns: Row, *, answered: bool) -> Iterator[dict[str, Any]]:
    for asked, answer in row.get(columns.get("history", "")) or ():
        yield {"role": "user", "content": asked}
        yield {"role": "assistant", "content": answer}
    names = (columns.get("prompt"), columns.get("query")) if columns else ("instruction", "input")
    parts = [row[name] for name in names if name and row.get(name)]
    yield {"role": "user", "content": "\n".join(parts)}
    if answered:
        yield {"role": "assistant", "content": row[columns.get("response", "output")]}


def _chat(row: Row, entry: Row) -> dict[str, Any]:
    """A row of axolotl's type chat_template."""
    field = next((name for name in ("messages", "conversations") if name in row), "messages")
    said = row[entry.get("field_messages") or field]
    turns = _turn("user", said) if isinstance(said, str) else _said(said, *_names(entry))
    tools = row.get(entry.get("field_tools") or "tools")
    return {"messages": turns, "tools": tools, "system": row.get("system")}


def _pair(row: Row, entry: Row) -> dict[str, Any]:
    """A row of axolotl's type chat_template with two answers."""
    whole = _chat(row, entry)
    made = {"prompt": whole.pop("messages"), **whole}
    for side in ("chosen", "rejected"):
        answer = row[entry.get(f"field_{side}") or side]
        last = answer[-1] if isinstance(answer, list) else answer
        is_text = isinstance(last, str)
        made[side] = _turn("assistant", last) if is_text else _said([last], *_names(entry))
    return made


def _names(entry: Row) -> tuple[dict[str, str], dict[str, str]]:
    """What an entry of axolotl says of the names of messages' fields and of roles."""
    mapped = (entry.get("message_property_mappings") or {}).items()
    names = {"from": "role", "value": "content", **{theirs: name for name, theirs in mapped}}
    for name, key in (("role", "role"), ("content", "content"), ("weight", "training")):
        if theirs := entry.get(f"message_field_{key}"):
            names[theirs] = name
    roles = (entry.get("roles") or {}).items()
    return names, {name: role for role, theirs in roles for name in theirs}


def _alpaca(row: Row, entry: Row) -> dict[str, Any]:
    prompt = ALPACA_WITH_INPUT if row.get("input") else ALPACA_WITHOUT_INPUT
    return {"prompt": prompt.format(**row) + "\n", "completion": row["output"]}


def _text(row: Row, entry: Row) -> dict[str, Any]:
    field = entry.get("field") or entry.get("text_column") or "text"
    return {"prompt": "", "completion": row[field]}


_STYLES: dict[str, Callable[[Row, Row], dict[str, Any]]] = {
    **{"LLaMA-Factory": as_messages, "chat": _chat, "pair": _pair, "alpaca": _alpaca},
    **{"text": _text, "as it is": lambda row, entry: dict(row)},
}
