"""A user's own message to the coordinator, in the documented form of this package's predecessor.

    from hetero_framework import control
    from hetero_framework.core.protocol import Message, MessageType

    control.send(
        Message(type=MessageType.CONTROL, payload={"command": "checkpoint"}, metadata={"step": 100})
    )

It travels as a CONTROL message whose name is the command and whose data is a map of `payload` and
`metadata`. `core/messages.py` has all messages of the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hetero_framework.core import messages
from hetero_framework.core.messages import Control
from hetero_framework.errors import ProtocolError


class MessageType(Enum):
    """The messages that users may send; hidden states and gradients are the framework's own."""

    CONTROL = "control"


@dataclass(frozen=True)
class UserMessage:
    """A command with its arguments.

    Args:
        payload: `command`, the name of the handler, and any other values that msgpack carries.
        metadata: Further values, such as the step that the message is about.

    Raises ProtocolError where the payload has no command, or a value that msgpack does not carry.
    """

    type: MessageType
    payload: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.type, MessageType):
            raise ProtocolError(f"type: must be a MessageType, not {self.type!r}")
        command = self.payload.get("command") if isinstance(self.payload, Mapping) else None
        if not isinstance(command, str):
            raise ProtocolError('payload: must be a map with the text "command"')
        self.on_wire()

    def on_wire(self) -> messages.Message:
        data = {"payload": dict(self.payload), "metadata": dict(self.metadata or {})}
        return messages.Message(Control(self.payload["command"], data))

    def to_bytes(self) -> bytes:
        """The whole frame, as it is sent."""
        return b"".join(messages.encode(self.on_wire()))

    @classmethod
    def from_bytes(cls, frame: bytes) -> UserMessage:
        """The message in one frame. Raises ProtocolError where the frame has another kind."""
        data = messages.decode(frame).expect(Control).data
        if not isinstance(data, dict) or data.keys() != {"payload", "metadata"}:
            raise ProtocolError("CONTROL: its data are no payload and metadata")
        return cls(MessageType.CONTROL, data["payload"], data["metadata"])


Message = UserMessage
