"""User-defined messages between coordinator and workers, over the existing links.

    from hetero_framework import control

    @control.on("gpu_temperature")
    def gpu_temperature(data):          # in the worker that is asked
        return {"celsius": 61}

    @control.after_step
    def watch(step, cluster):           # in the coordinator
        for worker in cluster.workers:
            print(worker, cluster.control(worker, "gpu_temperature"))

Save this as watch.py and add `--import watch.py` to the command on every machine. Data may be what
msgpack carries: null, bool, int, float, string, bytes, list, and map with string keys. A file may
also have transformers' `callbacks`, and the functions of FUNCTIONS for metrics (docs/python.md).
docs/maintainers/extending.md describes the rest.
"""

from __future__ import annotations

import importlib.util
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from hetero_framework import registry
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Control, Message, shortened
from hetero_framework.core.protocol import UserMessage
from hetero_framework.errors import CallbackError, HeteroError, UserError, is_out_of_memory
from hetero_framework.log import one_lines


class WorkerControl(Protocol):
    """The part of the coordinator's cluster that an `after_step` function may use."""

    @property
    def workers(self) -> Sequence[int | str]: ...

    def control(self, worker: int | str, name: str, data: Any = None) -> Any: ...


_log = logging.getLogger(__name__)
Handler = Callable[[Any], Any]
Watcher = Callable[[int, WorkerControl], None]
_H = TypeVar("_H", bound=Handler)
_W = TypeVar("_W", bound=Watcher)


@dataclass(frozen=True)
class WithTensors:
    """The result of a handler that answers with data and with raw bytes, as uint8 tensors."""

    data: Any
    tensors: tuple[WireTensor, ...]


_handlers: dict[str, Handler] = {}
_watchers: list[Watcher] = []
_imported: list[Path] = []
_callbacks: list[Any] = []
FUNCTIONS = ("compute_metrics", "preprocess_logits_for_metrics")
"""Functions of transformers' Trainer that imported files may define; the last file's counts."""
_functions: dict[str, Callable[..., Any]] = {}
_modules: list[ModuleType] = []
_OWN = "hetero."  # prefix of the names of the framework's own questions
_MOST_NOTICES = 16
"""Most notices kept in a step, since each may have 16 MiB."""
_notices: deque[Message] = deque()
"""Messages to the coordinator from its workers and its own code, handled after each step."""
_to_coordinator: Callable[[Message], None] = _notices.append

FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""Errors that the user's code usually raises."""


def on(name: str) -> Callable[[_H], _H]:
    """Decorator: the function answers requests called `name`, given their data. A later function of
    that name replaces it. It runs in the worker's computing thread: keep it to milliseconds."""

    def register(handler: _H) -> _H:
        _handlers[name] = handler
        return handler

    return register


def after_step(watcher: _W) -> _W:
    """Decorator: call the function as `watcher(step, cluster)` in the coordinator after each step,
    counted from 1. The next step waits for it; an error in it ends the run."""
    _watchers.append(watcher)
    return watcher


def users_line(error: BaseException) -> str:
    """The innermost line of an imported file in the error's traceback; "" if there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    files, frames = {str(path) for path in _imported}, traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}, line {f.lineno}" for f in frames if f.filename in files]
    return places[-1] if places else ""


def failure(error: BaseException) -> str:
    """An error of the user's code in one line, with its place."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    parts = [users_line(error), type(error).__name__, " ".join(text.split())]
    return ": ".join(filter(None, parts))


@contextmanager
def users_code(
    what: str,
    kind: type[UserError] = CallbackError,
    *,
    hint: str | None = None,
    failures: tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> Iterator[None]:
    """Within the block the user's code runs. An error that it raises is no bug of ours: it becomes
    a `kind`, which names its place. Out-of-memory errors and HeteroErrors stay as they are."""
    try:
        yield
    except failures as error:
        if isinstance(error, HeteroError) or is_out_of_memory(error):
            raise
        if isinstance(error, ImportError):
            hint = (
                "install it on every machine that has this --import, or set PYTHONPATH to the"
                " folder where it lies"
            )
        raise kind(f"{what}: {failure(error)}", hint=hint) from error


def as_list(callbacks: Any) -> list[Any]:
    """A list of callbacks, or a single callback, as a list."""
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def import_file(path: Path) -> None:
    """Run a Python file once. Keep its `callbacks` and the functions of FUNCTIONS that it defines.
    Raises UserError for a file that cannot be run."""
    path = path.resolve()
    if path in _imported:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file():
        raise UserError(f"--import {path}: there is no such file")
    if spec is None or spec.loader is None:
        raise UserError(f"--import {path}: this is no Python file", hint="its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    _imported.append(path)
    with users_code("--import", UserError, hint="correct the file"):
        spec.loader.exec_module(module)
    _modules.append(module)
    _callbacks.extend(as_list(getattr(module, "callbacks", ())))
    _functions.update({name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)})


def imported_callbacks() -> tuple[Any, ...]:
    """transformers' callbacks for the training, from imported files."""
    return tuple(_callbacks)


def function(name: str) -> Callable[..., Any] | None:
    """The function `name`, one of FUNCTIONS, that counts in this process; None without one."""
    return _functions.get(name)


def named(name: str) -> Any:
    """The object `name` of the last imported file that has it; None if no file does."""
    return next((getattr(m, name) for m in reversed(_modules) if hasattr(m, name)), None)


@contextmanager
def having(name: str, function: Callable[..., Any] | None) -> Iterator[None]:
    """Within the block, `function` replaces the imported function `name`; None changes nothing."""
    before = dict(_functions)
    if function is not None:
        _functions[name] = function
    try:
        yield
    finally:
        _functions.clear()
        _functions.update(before)


def imported_files() -> tuple[Path, ...]:
    """The files that worker processes started here must import too."""
    return tuple(_imported)


def send(message: UserMessage) -> None:
    """Send a message to the coordinator, from code in a worker or in the coordinator itself. After
    the step the coordinator calls the handler of the message's command; without a handler the
    message is ignored. The coordinator's own handler of "checkpoint" saves a checkpoint."""
    _to_coordinator(message.on_wire())


@contextmanager
def sending_by(carry: Callable[[Message], None]) -> Iterator[None]:
    """Within the block, `carry` takes this process's messages to its coordinator."""
    global _to_coordinator
    before, _to_coordinator = _to_coordinator, carry
    try:
        yield
    finally:
        _to_coordinator = before


@contextmanager
def coordinating(handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Within the block, this process is a coordinator, with `handlers` of its own. Messages to an
    earlier coordinator are dropped."""
    before = dict(_handlers)
    _notices.clear()
    _handlers.update(handlers)
    try:
        yield
    finally:
        _handlers.clear()
        _handlers.update(before)


def note(message: Message) -> None:
    """Keep a worker's message until the step ends. The framework's own questions are dropped,
    because their handlers load models and fill memory. Messages beyond _MOST_NOTICES are dropped
    too."""
    name = message.expect(Control).name
    if name.startswith(_OWN) or len(_notices) >= _MOST_NOTICES:
        _log.warning("a message of a worker to the coordinator was dropped: %s", shortened(name))
        return
    _notices.append(message)


def step_done(step: int, cluster: WorkerControl) -> None:
    """Call every `after_step` function, then the handlers of messages to the coordinator."""
    for watcher in _watchers:
        with users_code(f"the after_step function {getattr(watcher, '__name__', watcher)} failed"):
            watcher(step, cluster)
    for _ in range(len(_notices)):
        answer(_notices.popleft())


def _data(question: Control) -> Any:
    return question.data


def request(number: int, name: str, data: Any, tensors: tuple[WireTensor, ...] = ()) -> Message:
    """The message of a question; `number` comes back with the answer."""
    return Message(Control(name, data, request=number), tensors)


def answer(message: Message, checked: Callable[[Control], Any] = _data) -> Message | None:
    """Call this process's handler of a CONTROL message with `checked(question)`. Returns the answer
    if one was asked for. The answer carries an `error` if the name is unknown, the check or the
    handler fails, or the result cannot be sent."""
    question = message.expect(Control)
    name, number = question.name, question.request
    try:
        handler = _handlers.get(name)
        if handler is None and registry.has("answers", name):
            handler = registry.find("answers", name)
        if handler is None:
            raise UserError(f"no handler for {name!r} is registered")
        data, tensors = handler(checked(question)), ()
        if isinstance(data, WithTensors):
            data, tensors = data.data, data.tensors
        if number is None:
            return None
        return Message(Control(name, data, answers=number), tensors)
    except (HeteroError, *FAILURES) as error:  # none may end a run that is hours old
        text = error.message if isinstance(error, HeteroError) else repr(error)
        failed = Control(name, answers=number, error=f"{name}: {text}")
        return None if number is None else Message(failed)


def result(message: Message) -> Any:
    """The data of an answer. Raises UserError if the answer carries an `error` instead."""
    reply = message.expect(Control)
    if reply.error is not None:
        raise UserError(
            shortened(reply.error),
            hint="a worker knows the handlers of the files that its own --import options name",
        )
    # The framework prints the answers to its own questions; others are for the user's code.
    return one_lines(reply.data) if reply.name.startswith(_OWN) else reply.data
