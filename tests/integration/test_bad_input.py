"""Wrong inputs, row by row: one message with the fault, its place and the remedy; an exit code;
nothing left behind."""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

from hetero_framework.cli import main
from hetero_framework.cluster import cluster
from hetero_framework.core.devices import Device, Memory
from hetero_framework.core.frames import PROTOCOL_VERSION
from hetero_framework.core.messages import Message, Welcome
from hetero_framework.trainer import checkpoint
from tests.framed import framed
from tests.pools import Pool
from tests.samples import free_ports, save_llama

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

SCREEN_LINES = 24
LOCAL = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
FAR = {"hostname": "far", "ip": "far.invalid", "device": "cpu"}
TWO = [{"id": "local", "start": 0, "end": 3}, {"id": 1, "start": 3, "end": 6}]


class Ran:
    """What a command gave back: its exit code and what it showed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def expect(self, code: int, *texts: str) -> None:
        """The exit code and the texts (regular expressions), all in one short error message, which
        is the last thing that is said."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        _, start, message = self.err.rpartition("hetero: error: ")
        assert start, self.err
        assert len(message.splitlines()) <= SCREEN_LINES
        for text in texts:
            assert re.search(text, start + message), self.err


@pytest.fixture
def directory(tmp_path: Path, llama: Path, texts: Path) -> Path:
    """Wrong and right data files, beside the configuration."""
    files = {
        "good.jsonl": texts.read_text(),
        "empty.jsonl": "",
        "broken.jsonl": '{"text": "a"}\n{"text": broken\n',
        "field.jsonl": '{"foo": 1}\n',
        "number.jsonl": '{"text": "a b c"}\n{"text": 5}\n',
        "chat.jsonl": json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        ),
        "file": "x",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def run(directory: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command on a small valid configuration with changes in it."""
    base = {
        "coordinator": {**LOCAL, "port": free_ports(1)[0]},
        "workers": [],
        "shard_plan": [{"id": "local", "start": 0, "end": 6}],
        "model": {"name_or_path": str(llama)},
        "data": {"train": "good.jsonl", "max_length": 64},
        "training": {
            "output_dir": "run",
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            "report_to": "none",
            "visualize": False,
            "verify_architecture": False,
            "connect_timeout_s": 3.0,
            "liveness_timeout_s": 3.0,
        },
    }

    def call(
        changes: dict[str, Any] | None = None,
        *options: str,
        command: str = "train",
        text: str | None = None,
    ) -> Ran:
        file = directory / "config.json"
        file.write_text(json.dumps(merged(base, changes or {})) if text is None else text)
        code = main([command, "--config", str(file), *options])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: merged(base[key], value)
            if isinstance(value, dict) and isinstance(base.get(key), dict)
            else value
            for key, value in changes.items()
        },
    }


# -- the configuration file -----------------------------------------------------------------------


def test_a_missing_configuration(run, directory) -> None:
    run(None, "--config", str(directory / "none.json")).expect(
        2, "none.json does not exist", "hetero init"
    )


BROKEN = {
    "no value": ('{"version": "1",\n "coordinator": {,}}', r"line 2, column 18: not valid JSON"),
    "comma": ('{"version": "1",\n}', r"line 1, column 16.*comma before the closing"),
    "comment": ('{\n// hello\n"version": "1"}', r"line 2, column 1"),
    "cut off": ('{"version": "1"', r"line 1, column"),
    "nothing": ("", r"config\.json"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_json_names_line_and_column(case, run) -> None:
    text, message = BROKEN[case]
    run(text=text).expect(2, message)


def plan(*ranges: tuple[Any, int, int]) -> dict[str, Any]:
    return {"shard_plan": [{"id": i, "start": a, "end": b} for i, a, b in ranges]}


def with_workers(machine: dict[str, Any], *ports: int, **sections: Any) -> dict[str, Any]:
    """A plan over the coordinator and workers at these ports."""
    workers = [{**machine, "id": i, "port": port} for i, port in enumerate(ports, 1)]
    shares = [3, *range(4, 3 + len(ports)), 6]
    entries = [{"id": i, "start": shares[i - 1], "end": shares[i]} for i in range(1, len(shares))]
    first = [{"id": "local", "start": 0, "end": 3}]
    return {"workers": workers, "shard_plan": first + entries, **sections}


CONFIG = {
    "unknown key": (
        {"training": {"lerning_rate": 1}},
        [r"training\.lerning_rate", 'did you mean "learning_rate"'],
    ),
    "wrong type": ({"training": {"learning_rate": "fast"}}, [r"training\.learning_rate"]),
    "gap": (plan(("local", 0, 2), ("local", 3, 6)), [r"shard_plan\[1\]", "nobody holds layer 2"]),
    "overlap": (plan(("local", 0, 4), ("local", 3, 6)), [r"shard_plan\[1\]", "start it at 4"]),
    "order": (plan(("local", 3, 6), ("local", 0, 3)), [r"shard_plan\[0\]", "must start at 0"]),
    "too many layers": (plan(("local", 0, 9)), [r"shard_plan\[0\]\.end is 9", "model has 6"]),
    "one layer too few": (plan(("local", 0, 5)), [r"nobody holds layer 5\n", "end at 6"]),
    "unknown worker": (
        plan(("local", 0, 3), (7, 3, 6)),
        [r"shard_plan\[1\]\.id: 7 is not a worker"],
    ),
    "one port twice": (with_workers(LOCAL, 9999, 9999), [r"workers\[1\]\.port", "give each"]),
    "no such machine": (
        {
            "coordinator": {"hostname": "desk", "ip": "198.51.100.1"},
            **with_workers({**FAR, "ip": "198.51.100.2"}, 9999),
        },
        ["names this machine", r"198\.51\.100\.1", "--role coordinator"],
    ),
    "optimizer": ({"training": {"optim": "adamm"}}, [r"training\.optim: 'adamm'", "one of: .*sgd"]),
    "target modules": (
        {"adapter": {"target_modules": ["nope_proj"]}},
        ["nope_proj", "modules that can be named: .*q_proj"],
    ),
    "no device": (
        {"coordinator": {"device": "cuda:77"}},
        ["cuda:77", "this machine has|available|cpu"],
    ),
    "no data": ({"data": {"train": "none.jsonl"}}, ["data file not found: none.jsonl", "looked"]),
    "empty data": ({"data": {"train": "empty.jsonl"}}, [r"empty\.jsonl holds no example"]),
    "malformed data": ({"data": {"train": "broken.jsonl"}}, [r"broken\.jsonl:2: not JSON"]),
    "unknown fields": ({"data": {"train": "field.jsonl"}}, [r"field\.jsonl:1:", "fields foo"]),
    "number as text": ({"data": {"train": "number.jsonl"}}, [r"number\.jsonl:2:", "a string"]),
    "no chat template": (
        {"data": {"train": "chat.jsonl"}},
        ["tokenizer has no chat template", "chat_template_path"],
    ),
    "no model": (
        {"model": {"name_or_path": "./none"}},
        ["no model directory .*none", r"model\.name_or_path"],
    ),
    "output is a file": (
        {"training": {"output_dir": "file"}},
        [r"training\.output_dir", "it is a file", "--output-dir"],
    ),
    "output below a file": ({"training": {"output_dir": "file/run"}}, [r"training\.output_dir"]),
}


@pytest.mark.parametrize("case", CONFIG)
def test_a_wrong_setting_is_named_with_advice(case, run, directory) -> None:
    changes, messages = CONFIG[case]
    run(changes).expect(2, *messages)
    assert not (directory / "run" / "metrics.jsonl").exists()


def test_an_absent_checkpoint_lists_the_complete_ones(run) -> None:
    run(None, "--resume", "latest").expect(2, "no checkpoint in .*checkpoints")
    assert run({"training": {"save_strategy": "steps", "save_steps": 1}}).code == 0
    run(None, "--resume", "7").expect(2, "no checkpoint 7", "1, 2")


def test_an_output_directory_in_use(run, directory) -> None:
    (directory / "run").mkdir()
    with FileLock(directory / "run" / ".lock"):
        run().expect(2, "another run is writing into .*run", "choose another")


def test_samples_longer_than_max_length_are_counted(run) -> None:
    ran = run({"data": {"max_length": 4}})
    assert ran.code == 0
    assert "21 of 21 examples were longer than max_length=4 and were cut" in ran.out


# -- machines -------------------------------------------------------------------------------------


def test_a_worker_that_does_not_listen(run, monkeypatch) -> None:
    # As if 127.0.0.1 were another machine, where nobody has started the worker.
    monkeypatch.setattr(cluster, "local_worker_ids", lambda config: ())
    (port,) = free_ports(1)
    run(with_workers(LOCAL, port, training={"connect_timeout_s": 1.0})).expect(
        2, rf"cannot reach worker 1 at 127.0.0.1:{port}: .*\(tried \d+ times in", "start the worker"
    )


def test_a_worker_whose_name_is_not_known(run) -> None:
    far = with_workers(FAR, 9999, training={"connect_timeout_s": 1.0})
    run(far, "--insecure-plaintext").expect(
        2, r"cannot reach worker 1 at far\.invalid:9999", "check the spelling|firewall"
    )


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Something at a port that is no worker; `answer` gets each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        in_flight = []

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                in_flight.append(connection)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in in_flight:
                connection.close()


def test_a_port_of_another_program(run) -> None:
    with server(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
        run(with_workers(LOCAL, port)).expect(
            2, f"program at 127.0.0.1:{port} does not behave like a worker: worker 1: not a hetero"
        )


def test_a_port_that_accepts_and_says_nothing(run) -> None:
    with server(lambda sock: None) as port:
        run(with_workers(LOCAL, port)).expect(2, "does not behave like a worker", "silent for 3 s")


def test_a_port_that_closes_at_once(run) -> None:
    with server(lambda sock: sock.shutdown(socket.SHUT_RDWR)) as port:
        run(with_workers(LOCAL, port)).expect(2, "does not behave like a worker", "closed|lost")


WELCOME = Welcome(
    protocol=PROTOCOL_VERSION + 1,
    package="9.9",
    torch="2",
    device="cpu",
    device_label="cpu",
    memory_total=1,
    memory_free=1,
)


def test_a_worker_of_another_protocol_version(run) -> None:
    frame = framed(Message(WELCOME))
    with server(lambda sock: sock.sendall(frame)) as port:
        run(with_workers(LOCAL, port)).expect(
            2, f"speaks protocol version {PROTOCOL_VERSION + 1}", "install the same version"
        )


def test_a_worker_with_anothers_address(run, pool: Pool) -> None:
    port = pool.machines["workers"][1]["port"]
    run(with_workers(LOCAL, port)).expect(2, "worker 1 refused: this is worker 2, not 1")


def test_a_workers_port_that_is_taken(run) -> None:
    with server(lambda sock: None) as port:
        ran = run(with_workers(LOCAL, port), "--worker-id", "1", command="worker")
        ran.expect(2, f"cannot listen on 127.0.0.1:{port}: the port is in use", "stop the program")


def test_a_model_that_only_a_worker_lacks(run, directory, pool: Pool) -> None:
    """The worker looks beside its own configuration, where there is none."""
    save_llama(directory / "model")
    port = pool.machines["workers"][0]["port"]
    changes = with_workers(LOCAL, port, model={"name_or_path": "./model"})
    run(changes).expect(2, r"worker 1: .*no model directory .*model")


def test_a_stage_that_does_not_fit_its_device(run, monkeypatch) -> None:
    monkeypatch.setattr(Device, "memory", lambda self: Memory(1 << 20, 1 << 20))
    run().expect(2, r"stage 0", "1.00 MiB free", "layers")


# -- numbers and disks ----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_stage_and_micro_batch(run, directory, pool: Pool) -> None:
    model = save_llama(directory / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][0] = 3e38  # finite, but few sums of it are
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    port = pool.machines["workers"][0]["port"]
    training = {"max_skipped_steps": 2, "max_steps": 9, "gradient_accumulation_steps": 2}
    changes = with_workers(LOCAL, port, model={"name_or_path": str(model)}, training=training)
    ran = run(changes)
    ran.expect(
        5,
        "3 steps in a row had non-finite losses",
        r"micro-batch 0, first out of stage 1 \(worker 1, layers 3-5\)",
    )
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["skipped"] for line in lines] == ["non-finite"] * 2


def test_a_full_disk_costs_checkpoints_first_and_then_the_run(run, directory, monkeypatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "sync_file", full)
    ran = run({"training": {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}})
    ran.expect(6, "disk|space")
    for step in (1, 2):
        assert ran.out.count(f"checkpoint {step} could not be written") == 1
    assert list((directory / "run" / "checkpoints").iterdir()) == []


def test_worker_with_other_weights_is_refused_before_the_first_step(
    run: Callable[..., Ran], pool: Pool, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save_llama(pool.logs[0].parent / "refused", seed=7)
    save_llama(directory / "refused")
    capsys.readouterr()  # progress bars of saving
    # Relative: each process finds its own.
    plan = {"workers": pool.machines["workers"][:1], "shard_plan": TWO}
    changes = {**plan, "model": {"name_or_path": "refused"}}
    run(changes).expect(2, "worker 1 has loaded another model than the coordinator: .* weights of")
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    run(changes).expect(2, r"worker 1 .* coordinator: config\.json differs", "copy one model")
    assert not (directory / "run" / "metrics.jsonl").exists()
