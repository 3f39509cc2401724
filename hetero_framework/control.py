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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Control, Message, shortened
from hetero_framework.core.protocol import UserMessage
from hetero_framework.errors import HeteroError, UserError
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
    """A handler returns this to answer with raw bytes beside the data, as uint8 tensors."""

    data: Any
    tensors: tuple[WireTensor, ...]


_handlers: dict[str, Handler] = {}
_watchers: list[Watcher] = []
_imported: list[Path] = []
_callbacks: list[Any] = []
FUNCTIONS = ("compute_metrics", "preprocess_logits_for_metrics")
"""Of transformers' Trainer: an imported file may have them, and the last one of a name counts."""
_functions: dict[str, Callable[..., Any]] = {}
_modules: list[ModuleType] = []
_OWN = "hetero."  # what the names of the framework's own questions begin with
_MOST_NOTICES = 16
"""Of a step, since each may carry 16 MiB."""
_notices: deque[Message] = deque()
"""To the coordinator, from its workers and its own code; after each step they are handled."""
_to_coordinator: Callable[[Message], None] = _notices.append

# A handler's error is part of the answer; it must not end a run that is hours old.
_FAILURES = (
    *(HeteroError, ArithmeticError, AttributeError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


def on(name: str) -> Callable[[_H], _H]:
    """Decorator: answer requests called `name` with the function's result for their data; the last
    function of a name counts. It runs in the worker's computing thread: keep it to milliseconds."""

    def register(handler: _H) -> _H:
        _handlers[name] = handler
        return handler

    return register


def after_step(watcher: _W) -> _W:
    """Decorator: call the function as `watcher(step, cluster)` in the coordinator after each step,
    counted from 1. The next step waits for it; an error in it ends the run."""
    _watchers.append(watcher)
    return watcher


def import_file(path: Path) -> None:
    """Run a Python file that registers functions, once, and take up its list `callbacks` and its
    functions of FUNCTIONS, if it has any. Raises UserError if there is no such file."""
    path = path.resolve()
    if path in _imported:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--import {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _imported.append(path)
    _modules.append(module)
    _callbacks.extend(getattr(module, "callbacks", ()))
    _functions.update({name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)})


def imported_callbacks() -> tuple[Any, ...]:
    """transformers' callbacks for the training, from imported files."""
    return tuple(_callbacks)


def function(name: str) -> Callable[..., Any] | None:
    """The one of FUNCTIONS that this process has, if it has it."""
    return _functions.get(name)


def named(name: str) -> Any:
    """The object of this name in the last imported file that has one; None without one."""
    return next((getattr(m, name) for m in reversed(_modules) if hasattr(m, name)), None)


@contextmanager
def having(name: str, function: Callable[..., Any] | None) -> Iterator[None]:
    """Within, this process has `function` in place of an imported one; None changes nothing."""
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
    """Send a message to the coordinator, from code in a worker or in the coordinator itself. It
    comes to the handler of its command there after the step; without one it is ignored. The
    coordinator has one for "checkpoint", which saves."""
    _to_coordinator(message.on_wire())


@contextmanager
def sending_by(carry: Callable[[Message], None]) -> Iterator[None]:
    """Within, `carry` takes this process's messages to its coordinator."""
    global _to_coordinator
    before, _to_coordinator = _to_coordinator, carry
    try:
        yield
    finally:
        _to_coordinator = before


@contextmanager
def coordinating(handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Within, this process is a coordinator, with `handlers` of its own. What was sent to an
    earlier one is gone."""
    before = dict(_handlers)
    _notices.clear()
    _handlers.update(handlers)
    try:
        yield
    finally:
        _handlers.clear()
        _handlers.update(before)


def note(message: Message) -> None:
    """Keep a worker's notice until the step ends. A worker does not ask the framework's own
    questions of the coordinator, whose handlers load models and fill memory; these are dropped, as
    is what comes after `_MOST_NOTICES`."""
    name = message.expect(Control).name
    if name.startswith(_OWN) or len(_notices) >= _MOST_NOTICES:
        _log.warning("a message of a worker to the coordinator was dropped: %s", shortened(name))
        return
    _notices.append(message)


def step_done(step: int, cluster: WorkerControl) -> None:
    """Call every `after_step` function, then the handlers of what was sent to the coordinator."""
    for watcher in _watchers:
        watcher(step, cluster)
    for _ in range(len(_notices)):
        answer(_notices.popleft())


def _data(question: Control) -> Any:
    return question.data


def request(number: int, name: str, data: Any, tensors: tuple[WireTensor, ...] = ()) -> Message:
    """The message of a question; `number` comes back with the answer."""
    return Message(Control(name, data, request=number), tensors)


def answer(message: Message, checked: Callable[[Control], Any] = _data) -> Message | None:
    """Call this process's handler with a CONTROL message's data after `checked`; return the answer,
    if one was asked for. An unknown name, a check or a handler that fails, and data that cannot be
    sent become its `error`."""
    question = message.expect(Control)
    name, number = question.name, question.request
    handler = _handlers.get(name)
    try:
        if handler is None:
            raise UserError(f"no handler for {name!r} is registered")
        data, tensors = handler(checked(question)), ()
        if isinstance(data, WithTensors):
            data, tensors = data.data, data.tensors
        if number is None:
            return None
        return Message(Control(name, data, answers=number), tensors)
    except _FAILURES as error:
        text = error.message if isinstance(error, HeteroError) else repr(error)
        failed = Control(name, answers=number, error=f"{name}: {text}")
        return None if number is None else Message(failed)


def result(message: Message) -> Any:
    """The data of an answer. Raises UserError with the `error` that it carries instead."""
    reply = message.expect(Control)
    if reply.error is not None:
        raise UserError(
            shortened(reply.error),
            hint="a worker knows the handlers of the files that its own --import options name",
        )
    # The framework prints the answers to its own questions; others are for the user's code.
    return one_lines(reply.data) if reply.name.startswith(_OWN) else reply.data
