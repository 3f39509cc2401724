"""Write the generated parts of docs/maintainers/protocol.md: `python docs/protocol_tables.py`.

A part stands between the lines `<!-- generated: NAME -->` and `<!-- end -->`; the rest of the page
is written by hand. A test checks that the page agrees with the code.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import pairwise
from pathlib import Path

from hetero_framework import registry
from hetero_framework.cluster import link_probe
from hetero_framework.core import connection, frames, messages, session
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import BODIES, Body, Forward, Message

PAGE = Path(__file__).parent / "maintainers" / "protocol.md"
_ARROWS = {
    messages.COORDINATOR: "coordinator → worker",
    messages.WORKER: "worker → coordinator",
    messages.DIALLER: "connecting worker → accepting worker",
    messages.LISTENER: "accepting worker → connecting worker",
    messages.EITHER: "either",
}


for _name in registry.names("messages"):
    registry.find("messages", _name)  # which adds them to those of the heart
_ARROWS |= {
    one: f"{one} → {other}"
    for of in session.CONVERSATIONS
    for one, other in ((of.one, of.other), (of.other, of.one))
}


def render(page: str) -> str:
    """The page with its generated parts written anew."""
    for name, write in _PARTS.items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + write() + end + rest.partition(end)[2]
    return page


def _limits() -> str:
    rows = [
        ("protocol version", frames.PROTOCOL_VERSION),
        ("largest header of an ordinary message, bytes", frames.MAX_HEADER_BYTES),
        ("largest header of a message marked *long*, bytes", frames.MAX_LONG_HEADER_BYTES),
        ("largest frame before the handshake is done, bytes", frames.HANDSHAKE_MAX_FRAME_BYTES),
        ("largest frame that HELLO proposes by default, bytes", frames.DEFAULT_MAX_FRAME_BYTES),
        ("length that no frame reaches, bytes", frames.IMPOSSIBLE_FRAME_BYTES),
        ("tensors in a frame", frames.MAX_TENSORS),
        ("sizes in a shape", frames.MAX_DIMS),
        ("nesting of lists and maps in the fields", frames.MAX_DEPTH),
        ("values in a *long* header", frames.MAX_ELEMENTS),
        ("messages of a link that wait to be looked at", connection.MOST_MESSAGES),
        ("memory for the fields of those, bytes", connection.MOST_FIELD_BYTES),
        ("bytes of a CONTROL between workers", link_probe.MOST_BYTES_OF_PEER),
    ]
    return "| limit | value |\n|---|---|\n" + "".join(f"| {name} | {n} |\n" for name, n in rows)


def _between() -> str:
    return "".join(f"- `{name}`\n" for name in link_probe.BETWEEN_WORKERS)


def _dtypes() -> str:
    rows = "".join(f"| {d.code} | {d.name} | {d.itemsize} |\n" for d in frames.DTYPES)
    return "| code | dtype | bytes |\n|---|---|---|\n" + rows


def _messages() -> str:
    return "\n".join(_message(body) for body in BODIES.values())


def _message(body: type[Body]) -> str:
    spec = body.spec
    about = " ".join((inspect.getdoc(body) or "").split())
    lines = [f"### {spec.number} {spec.name} ({_ARROWS[spec.sender]})\n\n{about}\n\n"]
    about_fields = _about_fields(body)
    for name, (kind, required) in spec.fields.kinds.items():
        text = f". {about_fields[name]}" if name in about_fields else ""
        lines.append(f"- `{name}`{'' if required else ' (optional)'}: {kind.name}{text}\n")
    low, high = spec.tensors
    if spec.named:
        lines.append("- tensors: one for each of `names`, in that order\n")
    elif high:
        more = f", then {low} to {high} for each of `sides`" if spec.sided else ""
        lines.append(f"- tensors: {low if low == high else f'{low} to {high}'}{more}\n")
    if spec.max_header_bytes == frames.MAX_LONG_HEADER_BYTES:
        lines.append("- *long* header\n")
    return "".join(lines)


def _about_fields(body: type[Body]) -> dict[str, str]:
    """The docstrings below the fields of a message, by field."""
    [cls] = ast.parse(inspect.getsource(body)).body
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for pair in pairwise(cls.body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _order() -> str:
    peers = session.PEER_PHASES
    star = [phase for phase in session.Phase if phase not in peers]
    first, last = session.Phase.OPEN, session.Phase.CLOSED
    return (
        _order_of(star, messages.COORDINATOR, messages.WORKER)
        + "\nOn a link between two workers:\n\n"
        + _order_of((first, *peers, last), messages.DIALLER, messages.LISTENER)
        + "".join(
            f"\nOn a link {of.where}:\n\n" + _order_of((first, *phases, last), of.one, of.other)
            for of, phases in session.CONVERSATIONS.items()
        )
    )


def _order_of(phases: Iterable[Enum], one: str, other: str) -> str:
    lines = [f"| phase | meaning | {one} may send | {other} may send |\n|---|---|---|---|\n"]
    for phase in phases:
        cells = [_moves(phase, role) for role in (one, other)]
        lines.append(f"| {phase.name} | {phase.value} | {cells[0]} | {cells[1]} |\n")
    return "".join(lines)


def _moves(phase: Enum, role: str) -> str:
    moves = []
    for kind in session.legal(role, phase):
        following = session.ORDER[phase][kind]
        name = kind.spec.name
        moves.append(name if following is phase else f"{name} → {following.name}")
    return ", ".join(moves)


def _example() -> str:
    data = bytes.fromhex("803f 0040 4040".replace(" ", ""))  # 1, 2, 3
    body = Forward(step=7, attempt=0, stage=1, micro_batch=3)
    message = Message(body, [WireTensor("bfloat16", (1, 1, 3), memoryview(data))])
    frame = b"".join(messages.encode(message))
    header_bytes, payload_bytes = frames.parse_prefix(frame[:12])
    header = frame[12 : 12 + header_bytes]
    rows = [
        (frame[:8], f"u64: {len(frame) - 8} bytes follow"),
        (frame[8:12], f"u32: the header has {header_bytes} bytes"),
        (header[: -len(_tail(header))], 'msgpack: {"t": 12, "m": {step, attempt, stage, ...}'),
        (_tail(header), '... "x": [[3, [1, 1, 3]]]}: one bfloat16 tensor of shape 1, 1, 3'),
        (frame[-payload_bytes:], "the tensor: 1.0, 2.0, 3.0"),
    ]
    return "```text\n" + "".join(f"{part.hex(' ')}\n    {what}\n" for part, what in rows) + "```\n"


def _tail(header: bytes) -> bytes:
    return header[header.rindex(b"\xa1x") :]


_PARTS: dict[str, Callable[[], str]] = {
    "limits": _limits,
    "between workers": _between,
    "dtypes": _dtypes,
    "messages": _messages,
    "order": _order,
    "example": _example,
}

if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
