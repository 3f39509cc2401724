"""Configurations of the loopback, a worker in miniature, and who calls a real one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hetero_framework.config import Config
from hetero_framework.core.dial import connect
from hetero_framework.core.link import Link
from hetero_framework.core.messages import Body, Log, Message
from hetero_framework.errors import HeteroError
from tests.samples import free_ports
from tests.waiting import WAIT_S


def star(
    workers: list[dict[str, Any]], owners: Sequence[Any], base: Path | None = None, **sections: Any
) -> Config:
    """These workers of a coordinator on the loopback; each of `owners` has one layer."""
    plan = [{"id": owner, "start": k, "end": k + 1} for k, owner in enumerate(owners)]
    coordinator = {"ip": "127.0.0.1", "port": 1, "device": "cpu"}
    raw = {"coordinator": coordinator, "workers": workers, "shard_plan": plan}
    return Config.from_dict({**raw, **sections}, base)


@pytest.fixture
def config(tmp_path):
    """Workers 1 and 2 on this machine, with one and two threads; `tmp_path` is the base."""
    workers = [
        {"id": i, "ip": "127.0.0.1", "port": free_ports(1)[0], "num_threads": i} for i in (1, 2)
    ]
    return star(workers, ["local", 1, 2], tmp_path, training={"output_dir": "out"})


ROOT = Path(__file__).resolve().parents[3]
# It takes the options of a real worker and needs no torch.
_OPTIONS = """
import argparse, os, pathlib, subprocess, sys, threading, time
from hetero_framework.cluster.child import watch_parent
parser = argparse.ArgumentParser()
parser.add_argument("behaviour")
parser.add_argument("--supervised", action="store_true")
parser.add_argument("--keep", action="store_true")
parser.add_argument("--debug", action="store_true")
parser.add_argument("--config")
parser.add_argument("--base-dir")
parser.add_argument("--worker-id")
options = parser.parse_args()
behaviour = options.behaviour
"""


def stand_in(does: str, behaviour: str) -> list[str]:
    """The command of a worker in miniature, which does this with its `behaviour`."""
    return [sys.executable, "-c", _OPTIONS + does, behaviour]


def parent(
    program: str, config: Config, of_workers: list[str], **options: Any
) -> subprocess.Popen[str]:
    """A process that gets the configuration, its base, and the command of its workers."""
    argument = json.dumps([config.to_dict(), str(config.base_dir), of_workers])
    return subprocess.Popen(
        [sys.executable, "-c", program, argument],
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


B = TypeVar("B", bound=Body)


class Caller:
    """The other end of a process's link."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self.inbox: queue.SimpleQueue[Message | HeteroError | None] = queue.SimpleQueue()
        stream = connect("127.0.0.1", port, WAIT_S)
        self.link = Link(stream, "peer", self.inbox.put, self.inbox.put)
        self.link.start()
        stack.callback(self.link.close, 0)

    def send(self, body: Body) -> None:
        self.link.send(Message(body))

    def next(self) -> Message:
        """What comes next, lines for the screen aside."""
        while True:
            message = self.inbox.get(timeout=WAIT_S)
            assert isinstance(message, Message), message
            if not isinstance(message.body, Log):
                return message

    def expect(self, kind: type[B]) -> B:
        return self.next().expect(kind)

    def ends(self) -> HeteroError | None:
        """Why its link is over."""
        end = self.inbox.get(timeout=WAIT_S)
        assert not isinstance(end, Message), end.name
        return end
