"""`hetero chat`: talks to a run's result through the machines of its plan."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    IMPORT,
    ROLE_HELP,
    access_for,
    at_least,
    check_coordinator,
    flag,
    load,
    option,
    repeated,
    value,
)
from hetero_framework.core.files import refuse_output, write_file
from hetero_framework.errors import DataError, UserError

EXAMPLES = """
    hetero chat
    hetero chat --local --temperature 0.7 --system "Answer in one sentence."
    hetero chat --base
    hetero chat --image picture.png
    """


def _number(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return value

    return number


DECODING = (
    *CONFIG,
    value("--result", "DIR", "adapter or model (default: what the run wrote)"),
    flag("--base", "the model without the run's result"),
    flag("--local", "hold all layers on this machine"),
    value("--max-new-tokens", "N", "default: 512", type=at_least(1), default=512),
    value(
        "--temperature",
        "T",
        "0: always the likeliest token (default: as the model's generation_config says)",
        type=_number(0, 100),
    ),
    value(
        "--top-p",
        "P",
        "draw from the likeliest tokens of this probability (default: as for --temperature)",
        type=_number(1e-6, 1),
    ),
    value(
        "--top-k",
        "K",
        "draw from the K likeliest tokens; 0: from all (default: as for --temperature)",
        type=at_least(0),
    ),
    repeated("--stop", "TEXT", "end an answer with this text; may be repeated"),
    value("--seed", "N", "of the draws (default: 0)", type=at_least(0), default=0),
    option("--role", choices=("coordinator",), help=ROLE_HELP),
    *ACCESS,
    IMPORT,
)
OPTIONS = (
    *DECODING,
    value("--system", "TEXT", "a system prompt"),
    repeated("--image", "FILE", "a picture in the first message; may be repeated"),
)
_HELP = (
    "/save FILE writes the conversation as a line of training data, /image FILE puts a picture into"
    " the next message, /reset begins anew, /help says this, /exit ends; Ctrl-C ends an answer"
)


def talk_of(arguments: argparse.Namespace) -> tuple[Any, AbstractContextManager[Any]]:
    """The model that the options name, and the context in which it is loaded."""
    config = load(arguments)
    config.require("model")
    if not arguments.local:
        check_coordinator(config, arguments)
    from hetero_framework.extras.talking.result_model import Talk, with_result

    result = Path(arguments.result) if arguments.result else None
    config = with_result(config, result, base=arguments.base, local=arguments.local)
    talk, access = Talk(config), access_for(config, "local", arguments)
    session: Any = "chat" if arguments.command == "chat" else "generation"
    return talk, talk.loaded(access, session, debug=arguments.debug)


def chosen(talk: Any, arguments: argparse.Namespace, **changes: Any) -> Any:
    names = ("temperature", "top_p", "top_k", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    most, stop = arguments.max_new_tokens, tuple(arguments.stop or ())
    return talk.choice(**{**settings, "max_tokens": most, "stop": stop, **changes})


class _Ended(Exception):
    """Ctrl-C has ended an answer."""


@contextmanager
def _ended_by_ctrl_c(pipeline: Any) -> Iterator[None]:
    """Within the block Ctrl-C raises `_Ended` between two messages; a second, KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise _Ended

    before = signal.signal(signal.SIGINT, note)
    pipeline.check = check
    try:
        yield
    finally:
        pipeline.check = lambda: None
        signal.signal(signal.SIGINT, before)


def run(arguments: argparse.Namespace) -> None:
    talk, loaded = talk_of(arguments)
    asked = _seen(talk, arguments.image)
    with loaded as cluster:
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages, is_asked = list(system), sys.stdin.isatty()
        pictures, new = list[str](), list(asked)  # of the conversation, and of its next message
        print(f"{_HELP}\n" if talk.is_chat else f"the model continues each line; {_HELP}\n")
        for number in range(sys.maxsize):
            try:
                line = input("> " if is_asked else "").strip()
            except EOFError:
                return
            word, _, rest = line.partition(" ")
            if word == "/exit":
                return
            if word == "/reset":
                messages, pictures, new = list(system), [], list(asked)
            elif word == "/save":
                _save(messages, pictures, rest.strip())
            elif word == "/image":
                try:
                    new += _seen(talk, [rest.strip()])
                except DataError as error:
                    print(error.message)
            elif word == "/help":
                print(_HELP)
            elif word.startswith("/") and "/" not in word[1:]:  # no path
                print(f"there is no {word}; /help says what there is")
            elif line:
                said, shown = [*messages, _said(line, new)], pictures + new
                choice = chosen(talk, arguments, seed=arguments.seed + number)
                answer = _answer(talk, cluster, said, shown, choice)
                if answer is not None:
                    messages = [*said, {"role": "assistant", "content": answer}]
                    pictures, new = shown, []


def _said(line: str, pictures: list[str]) -> dict[str, Any]:
    """A message of the user: pictures, then a text."""
    parts = [*[{"type": "image"} for _ in pictures], {"type": "text", "text": line}]
    return {"role": "user", "content": parts if pictures else line}


def _seen(talk: Any, pictures: list[str]) -> list[str]:
    """The whole paths of pictures. Raises DataError for one that cannot be shown."""
    paths = [os.path.join(os.getcwd(), os.path.expanduser(picture)) for picture in pictures]
    if paths:
        talk.reader.prompt_of([_said("a try", paths)], paths)
    return paths


def _save(messages: list[dict[str, Any]], pictures: list[str], file: str) -> None:
    """Write the conversation to a file that is not there yet."""
    try:
        if not file or len(messages) < 2:
            raise UserError("/save FILE writes a conversation that has begun")
        refuse_output(path := Path(file).expanduser(), overwrite=False)
        row = {"messages": messages, **({"images": pictures} if pictures else {})}
        write_file(path, json.dumps(row, ensure_ascii=False).encode() + b"\n")
        print(f"wrote {path}")
    except (UserError, OSError) as error:
        print(getattr(error, "message", error))


def _answer(
    talk: Any, cluster: Any, said: list[dict[str, Any]], pictures: list[str], choice: Any
) -> str | None:
    """Print the model's answer while it comes. Returns the answer, or None where there is none."""
    import torch
    from transformers import TextStreamer

    streamer, tokens = TextStreamer(talk.tokenizer, skip_special_tokens=True), []

    def show(prompt: int, sample: int, token: int) -> None:
        tokens.append(token)
        streamer.put(torch.tensor([token]))

    try:
        prompt = talk.reader.prompt_of(said, pictures)
        talk.check([prompt])
        with _ended_by_ctrl_c(cluster.pipeline):
            talk.answer(cluster, [prompt], choice, show)
    except DataError as error:
        print(f"{error.message}; /reset begins anew")
        return None
    except _Ended:
        cluster.retrying(cluster.pipeline.abort)
    streamer.end()
    answer = str(talk.tokenizer.decode(tokens, skip_special_tokens=True))
    if not answer.strip():
        print("(the answer is empty)")
    return answer
