"""Lost links, killed processes and expired deadlines in a run. Real sockets, real processes.

A broken link costs a repeated step and nothing else: the losses, norms and weights of the run are
those of an undisturbed one, to the last bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.cluster import membership
from hetero_framework.config import Config, StageSpec
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.devices import Device
from hetero_framework.core.messages import Message
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.errors import NetworkError, PeerLostError, StoppedEarly, UserError
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.trainer import outputs
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.fault_proxy import FaultProxy, FrameCut
from tests.framed import framed
from tests.integration.test_parity import LORA, assert_same_runs
from tests.integration.test_resume import evals
from tests.pools import Notes, read_metrics, serving, started, with_own_worker
from tests.samples import free_ports, save_tiny

LONG = pytest.mark.long
pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

TRAINING = {
    "save_strategy": "steps",
    "save_steps": 3,
    "eval_steps": 4,
    "verify_architecture": False,
}
SILENT = {"liveness_timeout_s": 3.0}
"""For tests of silence alone: others count links, and a busy machine is silent as well."""


class SignalAt(Notes):
    """Does something after a step, once: by default it sends this process a signal."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self.at = step
        self.number = number

    def act(self) -> None:
        os.kill(os.getpid(), self.number)

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        if metrics["step"] == self.at:
            self.at, self.acted = 0, time.monotonic()  # the step may be repeated
            self.act()


def wait_for(condition: Callable[[], Any], log: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)  # nothing announces what another process writes


def written(config: Config, folder: Path) -> str:
    """The configuration's file."""
    file = folder / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    return str(file)


def pids(notes: Notes) -> list[int]:
    """Of the worker processes that the coordinator said it started."""
    found = (re.search(r"started as process (\d+)", line) for line in notes.lines)
    return [int(match[1]) for match in found if match]


def steps_of(output: Path) -> list[tuple]:
    return read_metrics(output) if (output / "metrics.jsonl").exists() else []


HELLO = m.Hello("stranger", 1, process="p", epoch=1, max_frame_bytes=1 << 20)


@pytest.fixture
def make(configured, texts):
    """A configuration for the pool; `through` has workers' addresses replaced by proxies'."""

    def build(
        name: str, cuts: list[int], through: dict[int, FaultProxy] | None = None, **sections: Any
    ) -> Config:
        sections.setdefault("adapter", LORA)
        sections.setdefault("links", "relay")  # test_links.py has the others
        sections["training"] = {**TRAINING, **sections.get("training", {})}
        data = {"train": str(texts), "max_length": 64, "eval": str(texts)}
        raw = configured(cuts, name, data=data, **sections).to_dict()
        for worker in raw["workers"]:
            if through and worker["id"] in through:
                worker["port"] = through[worker["id"]].port
        return Config.from_dict(raw)

    return build


@pytest.fixture(scope="module")
def whole(pool, llama, texts, tmp_path_factory):
    """Output directory of the undisturbed run in one process, with LoRA or "full"."""
    done: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp("whole") / kind
            raw = pool.config(
                done[kind],
                [],
                model={"name_or_path": str(llama)},
                data={"train": str(texts), "max_length": 64, "eval": str(texts)},
                adapter=LORA if kind == "lora" else None,
                training=TRAINING,
            )
            train(Config.from_dict(raw), progress=Notes())
        return done[kind]

    return get


UP = [m.Step, m.Inputs, m.Forward, m.Commit, m.StateRequest, m.Abort]
DOWN = [m.Loss, m.Backward, m.GradientNorms, m.Committed, m.State, m.Aborted]


def every_cut(reset: bool, first: bool) -> list[FrameCut]:
    """Each frame type of each direction, before, in and after it, for the first or last worker."""
    kinds = [("up", k) for k in UP] + [("down", k) for k in DOWN]
    if first:
        kinds += [("down", m.Forward), ("up", m.Backward)]
        kinds.remove(("down", m.Loss))
    cuts = []
    for direction, kind in kinds:
        for where in ("before", "middle", "after"):
            cuts.append(FrameCut(direction, kind, where, reset))
            if kind in (m.Abort, m.Aborted):  # there is none without a cut before it
                cuts.insert(-1, FrameCut("up", m.Inputs, "after", reset))
    return cuts


@LONG
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("worker", [1, 2])
def test_a_link_cut_at_any_frame_changes_nothing(
    worker, reset, make, proxies, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(membership, "MAX_RECOVERIES", 50)
    cuts = every_cut(reset, first=worker == 1)
    proxies[worker].cuts.extend(cuts)
    train(make("cut", [2, 4], proxies), progress=Notes())
    assert list(proxies[worker].cuts) == []
    assert proxies[worker].connections == len(cuts) + 1
    assert_same_runs(tmp_path / "cut", whole("lora"))


@LONG
@pytest.mark.parametrize("model_type", ["gemma4_text", "zamba2", "deepseek_v4"])
def test_a_link_cut_at_any_frame_of_a_model_with_side_tensors_changes_nothing(
    model_type, make, proxies, tmp_path, monkeypatch
):
    """Shared keys, original hidden states and a transformer in two stages, token ids."""
    monkeypatch.setattr(membership, "MAX_RECOVERIES", 50)
    model = {"name_or_path": str(save_tiny(model_type, tmp_path / "model"))}
    train(make("whole", [], model=model, adapter=None), progress=Notes())
    proxies[1].cuts.extend(every_cut(reset=False, first=True))
    train(make("cut", [2, 4], proxies, model=model, adapter=None), progress=Notes())
    assert list(proxies[1].cuts) == []
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.long
def test_a_link_cut_in_an_evaluation_changes_nothing(make, proxies, whole, tmp_path):
    training = {"eval_on_start": True}
    train(make("calm", [2, 4], training=training), progress=Notes())
    proxies[2].cuts.extend(
        FrameCut(direction, kind, where)
        for direction, kind in (("up", m.Step), ("up", m.Forward), ("down", m.Loss))
        for where in ("middle", "after")
    )
    proxies[2].cuts.popleft()  # five in one pass are the limit
    train(make("cut", [2, 4], proxies, training=training), progress=Notes())
    assert evals(tmp_path / "cut") == evals(tmp_path / "calm")
    assert_same_runs(tmp_path / "cut", whole("lora"))


@pytest.mark.long
def test_a_link_cut_while_resuming_changes_nothing(make, proxies, whole, tmp_path):
    with pytest.raises(StoppedEarly):
        train(make("cut", [3]), progress=SignalAt(5, signal.SIGTERM))
    proxies[1].cuts.extend(
        FrameCut(direction, kind, where)
        for direction, kind in (("up", m.LoadState), ("down", m.StateLoaded))
        for where in ("middle", "after")
    )
    train(make("cut", [2, 4], proxies), resume="latest", progress=Notes())
    assert not proxies[1].cuts
    assert_same_runs(tmp_path / "cut", whole("lora"))


@pytest.mark.parametrize(
    "cut",
    [
        FrameCut("down", m.Loss, "before"),
        pytest.param(FrameCut("down", m.GradientNorms, "middle"), marks=pytest.mark.long),
        pytest.param(FrameCut("up", m.Commit, "middle"), marks=pytest.mark.long),
        pytest.param(FrameCut("down", m.Committed, "middle"), marks=pytest.mark.long),
        pytest.param(FrameCut("up", m.Abort, "before"), marks=pytest.mark.long),
        FrameCut("down", m.State, "before"),
    ],
    ids=lambda cut: cut.kind.spec.name,
)
def test_both_links_cut_at_once_change_nothing(cut, make, proxies, whole, tmp_path):
    if cut.kind is m.Abort:
        proxies[2].cuts.append(FrameCut("up", m.Step, "after"))
    proxies[2].cuts.append(replace(cut, reset=True, also=proxies[1].reset))
    train(make("cut", [2, 4], proxies, adapter=None), progress=Notes())
    assert not proxies[2].cuts
    assert proxies[1].connections == 2
    assert_same_runs(tmp_path / "cut", whole("full"))


def test_a_flipped_bit_on_the_way_changes_nothing(make, proxies, whole, tmp_path):
    """To a worker, from one, and on a tensor's way through the coordinator, which does not look."""
    flips = {2: proxies[2].up, 3: proxies[2].down, 4: proxies[1].down, 5: proxies[1].up}

    def flip(step: int) -> None:
        if (faults := flips.get(step)) is not None:
            faults.flip_in = 3000  # of the next step

    notes = Notes(flip)
    train(make("run", [2, 4], proxies), progress=notes)
    assert sum(proxy.connections for proxy in proxies.values()) == len(proxies) + len(flips)
    assert any("a frame arrived damaged" in line for line in notes.lines)
    assert_same_runs(tmp_path / "run", whole("lora"))


@pytest.mark.long
def test_f15_segments_of_one_byte_and_latency_change_nothing(make, proxies, whole, tmp_path):
    proxies[1].up.slice_bytes = proxies[2].down.slice_bytes = 1
    proxies[1].down.delay_s = proxies[2].up.delay_s = 0.05
    train(make("run", [2, 4], proxies), progress=Notes())
    assert proxies[1].connections == proxies[2].connections == 1
    assert_same_runs(tmp_path / "run", whole("lora"))


@pytest.mark.long
def test_a_silent_link_is_given_up_and_opened_again(make, proxies, whole, tmp_path):
    """A black hole: no byte and no end. It heals when the coordinator dials again."""

    class Hole(SignalAt):
        def act(self) -> None:
            proxies[1].up.blackhole = proxies[1].down.blackhole = True

        def message(self, text: str) -> None:
            super().message(text)
            if "connecting again" in text:
                proxies[1].up.blackhole = proxies[1].down.blackhole = False

    notes = Hole(3)
    train(make("cut", [2, 4], proxies, training=SILENT), progress=notes)
    assert any("has been silent for 3 s" in line for line in notes.lines)
    assert_same_runs(tmp_path / "cut", whole("lora"))


@pytest.mark.long
def test_a_link_that_stays_silent_ends_the_run(make, proxies):
    class Hole(SignalAt):
        def act(self) -> None:
            proxies[1].up.blackhole = proxies[1].down.blackhole = True

    started = time.monotonic()
    config = make("cut", [2, 4], proxies, training={**SILENT, "rejoin_wait_s": 3.0})
    with pytest.raises(PeerLostError, match=r"worker 1 does not come back: ") as raised:
        train(config, progress=Hole(3))
    assert "continue after step" in str(raised.value)
    assert raised.value.exit_code == 75
    assert time.monotonic() - started < 60


def test_strangers_at_a_workers_port_disturb_nothing(make, pool, whole, tmp_path):
    address = ("127.0.0.1", pool.machines["workers"][0]["port"])
    strangers: list[socket.socket] = []
    greetings = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 4096,
        b"\xff" * 4096,
        framed(Message(m.Bye("be gone"))),
        framed(Message(HELLO)),
        framed(Message(replace(HELLO, protocol=99))),
        b"",
    ]

    def come(step: int) -> None:
        for greeting in greetings:
            strangers.append(socket.create_connection(address))
            strangers[-1].sendall(greeting)
        strangers.append(socket.create_connection(address))
        strangers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        strangers[-1].close()  # gone by RST before it is accepted

    notes = Notes(come)
    train(make("run", [2, 4]), progress=notes)
    for stranger in strangers:
        stranger.close()
    assert [line for line in notes.lines if "lost the link" in line] == []
    assert_same_runs(tmp_path / "run", whole("lora"))


def test_a_run_waits_for_a_worker_that_serves_another(make, pool, whole, tmp_path):
    other = socket.create_connection(("127.0.0.1", pool.machines["workers"][0]["port"]))
    other.sendall(framed(Message(HELLO)))
    assert other.recv(1)

    class Patient(Notes):
        def message(self, text: str) -> None:
            super().message(text)
            if "busy with the training from 127" in text:
                other.close()

    train(make("run", [2, 4]), progress=Patient())
    assert other.fileno() == -1
    assert_same_runs(tmp_path / "run", whole("lora"))


# -- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", seldom([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_signal_ends_the_run_after_the_step_and_it_resumes(number, make, whole, tmp_path):
    with pytest.raises(StoppedEarly, match=f"stopped by {number.name} after step 4") as raised:
        train(make("run", [3]), progress=SignalAt(4, number))
    assert raised.value.exit_code == 75
    assert "--resume latest" in str(raised.value)
    train(make("run", [2, 4]), resume="latest", progress=Notes())
    assert_same_runs(tmp_path / "run", whole("lora"))


def test_a_second_signal_stops_at_once(make, tmp_path):
    class Twice(SignalAt):
        def act(self) -> None:
            super().act()
            super().act()

    with pytest.raises(StoppedEarly, match="stopped at once by SIGINT"):
        train(make("run", [3]), progress=Twice(4))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_3"]


def test_ctrl_c_while_a_worker_starts_stops_at_once_and_leaves_none(make):
    timers = []

    class Impatient(Notes):
        def message(self, text: str) -> None:
            super().message(text)
            if "started as process" in text:
                timers.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)))
                timers[0].start()

    notes = Impatient()
    try:
        with pytest.raises(StoppedEarly, match="stopped at once by SIGINT"):
            train(with_own_worker(make("run", [3])), progress=notes)
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
    (pid,) = pids(notes)
    assert not psutil.pid_exists(pid)


# -- patience -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stage_may_compute_for_longer_than_a_link_may_be_silent(make, whole, tmp_path):
    longer_than_liveness_s = 4.0

    def build(
        run: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
    ) -> list[Stage]:
        stages = load_stages(run, specs, device)
        stage, real, calls = stages[0], stages[0].forward_backward, count(1)

        def slow(*args: Any) -> Any:
            if next(calls) == 6:
                time.sleep(longer_than_liveness_s)
            return real(*args)

        stage.forward_backward = slow  # type: ignore[method-assign]
        return stages

    config, notes = with_own_worker(make("run", [3], adapter=None, training=SILENT)), Notes()
    with serving(config, build=build):
        train(config, progress=notes)
    assert not any("lost the link" in line for line in notes.lines)
    assert_same_runs(tmp_path / "run", whole("full"))


# -- processes that end ---------------------------------------------------------------------------


@LONG
def test_a_worker_that_is_killed_at_the_last_gathering_costs_no_result(
    make, whole, tmp_path, monkeypatch
):
    """The checkpoint of the last step is there by then; nothing else is asked of the exit code."""
    notes, export = Notes(), outputs.export

    def killed(*args: Any) -> Path:
        with suppress(ProcessLookupError):
            os.kill(pids(notes)[0], signal.SIGKILL)
        return export(*args)

    monkeypatch.setattr(outputs, "export", killed)
    config = with_own_worker(make("run", [2, 4], training={"save_strategy": "epoch"}))
    assert train(config, progress=notes).files["adapter"].is_dir()
    assert_same_runs(tmp_path / "run", whole("lora"))


@LONG
@pytest.mark.parametrize(
    ("number", "shown"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_worker_that_is_told_to_end_hands_over_and_nothing_is_repeated(
    number, shown, make, whole, tmp_path
):
    """As on a machine that shuts down; here it is started again at once."""

    class Terminate(SignalAt):
        def act(self) -> None:
            os.kill(pids(self)[0], number)

    notes = Terminate(4)
    train(with_own_worker(make("run", [2, 4])), progress=notes)
    assert any("worker 1 left (" in line and shown in line for line in notes.lines)
    assert any("(repeats 0 steps)" in line for line in notes.lines)
    assert_same_runs(tmp_path / "run", whole("lora"))


@LONG
@pytest.mark.parametrize("comes_back", [False, True])
def test_advice_after_a_lost_worker_works_when_it_is_followed(comes_back, make, whole, tmp_path):
    """Two workers that were started by hand, without --keep; one of them is killed."""
    raw = make("run", [2, 4]).to_dict()
    for worker, port in zip(raw["workers"], free_ports(2), strict=True):
        worker["port"] = port
    config = Config.from_dict(raw)
    words = ["worker", "--config", written(config, tmp_path), "--worker-id"]
    logs = {i: tmp_path / f"worker-{i}" for i in (1, 2)}
    workers: dict[int, subprocess.Popen[bytes]] = {}

    def start(number: int) -> None:
        workers[number] = started(logs[number], *words, str(number))
        wait_for(lambda: "listens" in logs[number].read_text(), logs[number])

    class Kill(SignalAt):
        def act(self) -> None:
            workers[1].kill()
            workers[1].wait()

        def message(self, text: str) -> None:
            super().message(text)
            if comes_back and "if nothing there starts it again" in text:
                start(1)

    try:
        for number in logs:
            start(number)
        if comes_back:
            notes = Kill(4)
            train(Config.from_dict(raw), progress=notes)
            assert any("worker 1 is back in a new process" in line for line in notes.lines)
        else:
            raw["training"]["rejoin_wait_s"] = 3.0
            with pytest.raises(PeerLostError, match="worker 1 does not come back") as raised:
                train(Config.from_dict(raw), progress=Kill(5))
            assert raised.value.exit_code == 75
            assert "start worker 1 again on its machine" in raised.value.hint
            assert "with the same command or with --resume latest" in raised.value.hint
            start(1)
            train(config, progress=Notes())
        assert [worker.wait(timeout=30) for worker in workers.values()] == [0, 0]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    assert_same_runs(tmp_path / "run", whole("lora"))


@pytest.mark.long
def test_workers_of_another_run_of_this_machine_are_not_used(make, tmp_path):
    config = with_own_worker(make("one", [3], training={"max_steps": 5000}))
    second = config.with_changes(training={"output_dir": str(tmp_path / "two")})
    refused: list[pytest.ExceptionInfo[NetworkError]] = []

    class Second(SignalAt):
        def act(self) -> None:
            with pytest.raises(NetworkError, match="started by another run") as raised:
                train(second, progress=Notes())
            refused.append(raised)
            super().act()

    with pytest.raises(StoppedEarly):
        train(config, progress=Second(2))
    assert '"port" for worker 1' in str(refused[0].value)


@LONG
def test_workers_that_the_command_line_starts_are_not_used_by_another_run(make, tmp_path):
    """They are started before anything else; they belong to their run nevertheless."""
    config = with_own_worker(make("one", [3], training={"max_steps": 5000}))
    words = ["train", "--config", written(config, tmp_path)]
    log, refused = tmp_path / "log", tmp_path / "refused"
    first = started(log, *words)
    try:
        wait_for(lambda: len(steps_of(tmp_path / "one")) >= 2, log)
        (child,) = psutil.Process(first.pid).children()
        assert "--run-id" in child.cmdline()
        second = started(refused, *words, "--output-dir", str(tmp_path / "two"))
        assert second.wait(120) == UserError.exit_code, refused.read_text()
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    assert "it was started by another run of its machine" in refused.read_text()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, log)


@pytest.mark.long
def test_a_short_loss_of_a_link_during_loading_is_recovered(make, proxies, whole, tmp_path):
    proxies[1].cuts.append(FrameCut("up", m.Setup, "after"))
    proxies[2].cuts.append(FrameCut("down", m.Ready, "middle"))
    train(make("cut", [2, 4], proxies), progress=Notes())
    assert not [*proxies[1].cuts, *proxies[2].cuts]
    assert_same_runs(tmp_path / "cut", whole("lora"))


@LONG
def test_a_worker_that_is_frozen_is_killed_and_started_again(make, whole, tmp_path, monkeypatch):
    class Stop(SignalAt):
        def act(self) -> None:
            os.kill(pids(self)[0], signal.SIGSTOP)

    monkeypatch.setattr(timeouts, "REHANDSHAKE_S", 3.0)
    notes = Stop(3)
    train(with_own_worker(make("run", [2, 4], training=SILENT)), progress=notes)
    assert any("worker 1 does not answer; its process is killed" in line for line in notes.lines)
    assert not psutil.pid_exists(pids(notes)[0])
    assert_same_runs(tmp_path / "run", whole("lora"))


@pytest.mark.long
def test_killing_the_coordinator_ends_its_workers_and_frees_the_others(
    make, proxies, whole, tmp_path
):
    """Worker 1 is the coordinator's child, worker 2 stands by itself and serves the next run."""
    proxies[2].up.delay_s = 0.1  # so that the run is not over too soon
    config = with_own_worker(make("run", [2, 4], proxies))
    log = tmp_path / "log"
    coordinator = started(log, "train", "--config", written(config, tmp_path))
    try:
        wait_for(lambda: len(steps_of(tmp_path / "run")) >= 4, log)
        (child,) = psutil.Process(coordinator.pid).children()
    finally:
        coordinator.kill()
        coordinator.wait()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, log)
    train(make("run", [2, 4]), resume="latest", progress=Notes())
    assert_same_runs(tmp_path / "run", whole("lora"))


def test_ctrl_c_in_the_terminal_releases_all_workers(make, tmp_path):
    """The signal goes to the whole group, as a terminal sends it."""
    config = with_own_worker(make("run", [3], training={"max_steps": 5000}))
    file, own, log = written(config, tmp_path), tmp_path / "worker.log", tmp_path / "log"
    worker = started(own, "worker", "--config", file, "--worker-id", "1")
    # Else a faster coordinator starts a worker of its own, and this one waits for another run.
    wait_for(lambda: "listens" in own.read_text(), own)
    words = ["train", "--role", "coordinator", "--config", file]
    coordinator = started(log, *words, start_new_session=True)
    try:
        wait_for(lambda: len(steps_of(tmp_path / "run")) >= 2, log)
        os.killpg(coordinator.pid, signal.SIGINT)
        assert coordinator.wait(timeout=30) == 75, log.read_text()
        assert worker.wait(timeout=30) == 0, own.read_text()
    finally:
        for process in (coordinator, worker):
            process.kill()
            process.wait()
    text = own.read_text() + log.read_text()
    assert "stopped by SIGINT after step" in text
    assert "Traceback" not in text
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
