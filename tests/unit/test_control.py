"""Requests to handlers as messages; no socket."""

from __future__ import annotations

import pytest

from hetero_framework import control
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Control, Message, decode, encode
from hetero_framework.core.protocol import MessageType, UserMessage
from hetero_framework.errors import CallbackError, DeviceError, UserError


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Nothing of a test stays registered."""
    monkeypatch.setattr(control, "_handlers", {})
    monkeypatch.setattr(control, "_watchers", [])
    monkeypatch.setattr(control, "_imported", [])


def over_the_wire(message: Message) -> Message:
    return decode(b"".join(bytes(buffer) for buffer in encode(message)))


def ask(name: str, data: object, number: int = 7) -> Message:
    reply = control.answer(over_the_wire(control.request(number, name, data)))
    return over_the_wire(reply)


def test_a_request_gets_the_return_value_of_its_handler():
    control.on("double")(lambda data: {"twice": data * 2, "raw": b"\x00"})
    reply = ask("double", 21, number=3)
    assert reply.body.answers == 3
    assert reply.body.name == "double"
    assert control.result(reply) == {"twice": 42, "raw": b"\x00"}


def test_decorator_returns_the_function_and_a_second_one_replaces_it():
    @control.on("who")
    def first(data: object) -> str:
        return "first"

    assert first(None) == "first"
    control.on("who")(lambda data: "second")
    assert control.result(ask("who", None)) == "second"


def test_a_message_to_the_coordinator_reaches_its_handler_once_the_step_is_done():
    saved: list[object] = []
    message = UserMessage(MessageType.CONTROL, {"command": "checkpoint"}, {"step": 100})
    unknown = UserMessage(MessageType.CONTROL, {"command": "unknown"})
    control.send(message)  # to an earlier coordinator
    with control.coordinating({"checkpoint": saved.append}):
        control.step_done(1, None)  # type: ignore[arg-type]
        assert saved == []
        for one in (unknown, message):
            control.send(one)
        assert saved == []
        control.step_done(2, None)  # type: ignore[arg-type]
        assert saved == [{"payload": {"command": "checkpoint"}, "metadata": {"step": 100}}]
        control.step_done(3, None)  # type: ignore[arg-type]
        assert len(saved) == 1
    assert control.answer(control.request(1, "checkpoint", None)).body.error


def test_a_worker_sends_its_messages_to_the_coordinator():
    sent: list[Message] = []
    with control.sending_by(sent.append):
        control.send(UserMessage(MessageType.CONTROL, {"command": "checkpoint"}))
    (message,) = map(over_the_wire, sent)
    assert message.expect(Control).request is None
    taken: list[object] = []
    with control.coordinating({"checkpoint": taken.append}):
        control.note(message)
        control.step_done(1, None)  # type: ignore[arg-type]
    assert len(taken) == 1


def test_a_worker_neither_asks_the_frameworks_questions_nor_floods_the_coordinator(logged):
    asked: list[object] = []
    with control.coordinating({"hetero.measure": asked.append, "count": asked.append}):
        for name in ("hetero.measure", *["count"] * 40):
            control.note(over_the_wire(Message(Control(name, None))))
        control.step_done(1, None)  # type: ignore[arg-type]
        assert len(asked) == control._MOST_NOTICES
    assert "hetero.measure" in logged[0]
    assert len(logged) == 1 + 40 - control._MOST_NOTICES


def test_bytes_travel_beside_question_and_answer():
    def raw(data: bytes) -> WireTensor:
        return WireTensor("uint8", (len(data),), memoryview(data))

    control.on("blob")(lambda data: control.WithTensors({"n": data}, (raw(b"\x00\xff"),)))
    question = over_the_wire(control.request(4, "blob", 2, (raw(b"abc"),)))
    assert bytes(question.tensors[0].data) == b"abc"
    reply = control.answer(question)
    reply = over_the_wire(reply)
    assert control.result(reply) == {"n": 2}
    assert [bytes(tensor.data) for tensor in reply.tensors] == [b"\x00\xff"]


def test_answers_to_the_framework_are_escaped():
    said = {"versions\n": ["2.13\nhetero: error: fake", 1, None, {"a": "\x1b[2J\u2028"}]}
    shown = {"versions\\n": ["2.13\\nhetero: error: fake", 1, None, {"a": "\\x1b[2J\\u2028"}]}
    for name, expected in (("hetero.test", shown), ("of_the_user", said)):
        control.on(name)(lambda data: said)
        assert control.result(ask(name, None)) == expected


def test_an_unknown_name_raises_where_it_was_asked_for():
    with pytest.raises(UserError, match="nobody: no handler for 'nobody' is registered"):
        control.result(ask("nobody", None))


@pytest.mark.parametrize(
    ("raised", "text"),
    [(KeyError("card"), "KeyError"), (DeviceError("no sensor"), "no sensor"), (OSError(5), "OS")],
)
def test_a_failing_handler_raises_where_it_was_asked_for(raised, text):
    @control.on("temperature")
    def fails(data: object) -> None:
        raise raised

    with pytest.raises(UserError, match=f"temperature: .*{text}"):
        control.result(ask("temperature", None))


def test_an_answer_that_cannot_travel_raises_where_it_was_asked_for():
    control.on("objects")(lambda data: object())
    with pytest.raises(UserError, match="object cannot travel"):
        control.result(ask("objects", None))


def test_notice_reaches_the_handler_and_gets_no_answer():
    seen: list[object] = []
    control.on("note")(seen.append)
    assert control.answer(Message(Control("note", "hello"))) is None
    assert seen == ["hello"]
    assert control.answer(Message(Control("other", None))) is None


def test_watchers_see_every_step_in_the_order_of_registration():
    seen: list[tuple[str, int]] = []
    control.after_step(lambda step, cluster: seen.append(("a", step)))
    control.after_step(lambda step, cluster: seen.append(("b", step)))
    for step in (1, 2):
        control.step_done(step, cluster=None)  # type: ignore[arg-type]
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_file_is_imported_once_and_remembered_for_worker_processes(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from hetero_framework import control\n"
        "control.on('mine')(lambda data: 1)\n"
        "control.after_step(print)\n"
    )
    control.import_file(file)
    control.import_file(tmp_path / "." / "mine.py")
    assert control.imported_files() == (file.resolve(),)
    assert control.result(ask("mine", None)) == 1
    assert len(control._watchers) == 1


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("absent.py", None, "there is no such file"),
        ("mine.txt", "", "this is no Python file"),
        ("mine.py", "x = 1\ndef f(:\n", "mine.py, line 2: SyntaxError"),
        ("mine.py", "def f():\n    raise KeyError('a\\nb')\n\nf()\n", "mine.py, line 2: KeyError"),
        ("mine.py", "import nothere\n", r"mine.py, line 1: .*No module named 'nothere'\n  install"),
        ("mine.py", "class Own(Exception): pass\nraise Own\n", "mine.py, line 2: Own\n"),
        ("mine.py", "import sys\nsys.exit(0)\n", "mine.py, line 2: SystemExit: 0"),
    ],
)
def test_file_that_cannot_be_run_is_the_users_mistake(tmp_path, name, code, said):
    if code is not None:
        (tmp_path / name).write_text(code)
    with pytest.raises(UserError, match=rf"^--import.*{said}") as error:
        control.import_file(tmp_path / name)
    assert "\n" not in error.value.message


@pytest.mark.parametrize("value", ["[A]", "(A,)", "A", "A()"])
def test_callbacks_may_be_a_list_or_a_single_one(tmp_path, monkeypatch, value):
    monkeypatch.setattr(control, "_callbacks", [])
    (tmp_path / "mine.py").write_text(f"class A: pass\ncallbacks = {value}\n")
    control.import_file(tmp_path / "mine.py")
    (found,) = control.imported_callbacks()
    assert "A" in (getattr(found, "__name__", ""), type(found).__name__)


def test_after_step_function_that_fails_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from hetero_framework import control\n"
        "@control.after_step\n"
        "def watch(step, cluster):\n"
        "    return 1 / 0\n"
    )
    control.import_file(tmp_path / "mine.py")
    with pytest.raises(CallbackError, match=r"function watch failed: .*mine.py, line 4: ZeroDiv"):
        control.step_done(1, None)  # type: ignore[arg-type]
