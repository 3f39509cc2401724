"""Messages of users' own, in the form that the ancestor documents."""

from __future__ import annotations

import pytest

from hetero_framework.core import messages
from hetero_framework.core.messages import Bye, Control
from hetero_framework.core.protocol import Message, MessageType
from hetero_framework.errors import ProtocolError


def test_a_message_is_one_frame_of_the_protocol():
    message = Message(
        type=MessageType.CONTROL, payload={"command": "checkpoint"}, metadata={"step": 100}
    )
    frame = message.to_bytes()
    assert Message.from_bytes(frame) == message
    control = messages.decode(frame).expect(Control)
    assert (control.name, control.request) == ("checkpoint", None)
    assert Message(MessageType.CONTROL, {"command": "x"}).metadata == {}


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({}, 'payload: must be a map with the text "command"'),
        ({"command": 3}, "command"),
        (["checkpoint"], "payload"),
        ({"command": "x", "value": object()}, "CONTROL"),
    ],
)
def test_a_payload_without_a_command_or_that_cannot_travel_is_refused(payload, text):
    with pytest.raises(ProtocolError, match=text):
        Message(MessageType.CONTROL, payload)


@pytest.mark.parametrize(
    "body", [Bye("over"), Control("checkpoint", None), Control("x", {"payload": 1, "metadata": {}})]
)
def test_other_frames_are_no_such_messages(body):
    with pytest.raises(ProtocolError):
        Message.from_bytes(b"".join(messages.encode(messages.Message(body))))
