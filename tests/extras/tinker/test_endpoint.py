"""The endpoint over HTTP: keys, bad requests, the client itself, and kills of the coordinator."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig

from hetero_framework.errors import ConfigError, IdentityError, NetworkError
from hetero_framework.extras.tinker.endpoint import Endpoint, encryption_for
from hetero_framework.security.certificates import ensure_authority
from hetero_framework.security.keys import FOLDER, KeyDirectory
from tests.cases import seldom
from tests.extras.tinker.calling import ADAM, drawn, request
from tests.extras.tinker.serving import Server, served
from tests.integration.oracles import read_rows
from tests.samples import save_llama
from tests.waiting import WAIT_S

pytest.importorskip("tinker")
pytestmark = pytest.mark.xdist_group("pool")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with served(tmp_path_factory.mktemp("served"), model) as made:
        yield made


def started(server: Server, model: Any) -> str:
    """The id of a new model."""
    told = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    _, session = server.ask("create_session", told)
    about = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": str(model)}
    made = server.result("create_model", {**about, "lora_config": {"rank": 4, "seed": 1}})
    return str(made["model_id"])


def passes(id: str) -> list[tuple[str, Any]]:
    """Calls of two steps, the second of two passes."""
    calls: list[tuple[str, Any]] = []
    for seq, kind in enumerate(["sft", "step", "sft", "rl", "step", "forward"], 1):
        if kind == "step":
            calls.append(("optim_step", {"model_id": id, "seq_id": seq, "adam_params": ADAM}))
            continue
        examples = drawn(7, 5, "weights")
        asked = request(examples, "cross_entropy", id, seq, forward_only=kind == "forward")
        if kind == "rl":
            asked = request(drawn(8, 5, "logprobs", "advantages"), "ppo", id, seq)
        calls.append(("forward_backward", asked.SerializeToString()))
    return calls


@pytest.mark.long
@pytest.mark.parametrize("kills", [(1,), (2, 3), (3, 4), (4, 5)])
def test_a_killed_coordinator_goes_on_with_the_same_bits(kills, model, tmp_path):
    """The process is killed after these calls; the client asks the same address again."""
    found: dict[bool, list[Any]] = {}
    for is_killed in (False, True):
        with served(tmp_path / str(is_killed), model) as server:
            id = started(server, model)
            results = found[is_killed] = []
            for number, (path, body) in enumerate(passes(id)):
                _, promise = server.ask(path, body)
                if is_killed and number in kills:  # it may be under way, or done and not answered
                    server.kill()
                    server.start()
                    assert server.ask(path, body)[1] == promise  # a retry finds the same call
                results.append(server.retrieved(promise["request_id"]))
    assert found[True] == found[False]
    assert not [each for each in found[True] if isinstance(each, dict) and "error" in each]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "said"),
    [
        ("get_info", {}, {"X-API-Key": "tml-wrong"}, 401, "the API key is wrong"),
        ("get_info", {}, {"Origin": "http://evil.example"}, 403, "a page in a browser"),
        ("get_info", {}, {"Host": "evil.example"}, 421, "to its name only, 127.0.0.1"),
        ("get_info", {}, {"Content-Length": str(1 << 40)}, 413, "is the most"),
        ("get_info", b"[]", {}, 400, "get_info: the body cannot be read"),
        ("get_info", {"model_id": "x"}, {}, 404, "there is no model 'x'"),
        ("retrieve_future", {"request_id": "x"}, {}, 410, "make it again"),
        ("elsewhere", {}, {}, 404, "elsewhere is not served here"),
        ("forward_backward", b"\xff", {}, 422, "the body cannot be read"),
        ("session_heartbeat", {"session_id": "x"}, {}, 404, "there is no session 'x'"),
        (
            *("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.1.0"}, {}),
            *(400, "the client's version 0.1.0 is not known here"),
        ),
    ],
)
def test_bad_requests_are_refused_in_words(path, body, headers, status, said, server):
    found, answer = server.ask(path, body, **headers)
    assert found == status
    assert said in answer["detail"]


def test_a_second_session_is_told_who_has_the_model(server, model):
    first = started(server, model)
    told = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    _, session = server.ask("create_session", told)
    about = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": str(model)}
    answer = server.result("create_model", {**about, "lora_config": {"rank": 4}})
    assert f"which session {first.partition(':')[0]} trains" in answer["error"]
    bad = {"model_id": first, "seq_id": 9, "adam_params": {**ADAM, "beta1": 1.0}}
    assert "beta1 is 1.0" in server.result("optim_step", bad)["error"]


def test_an_endpoint_that_cannot_be_is_refused_in_words(server, tmp_path):
    keys = KeyDirectory(tmp_path)
    with pytest.raises(ConfigError, match="no address or name of this machine"):
        encryption_for("0.0.0.0", keys, tmp_path)
    with pytest.raises(IdentityError, match="hetero invite"):
        encryption_for("localhost", keys, tmp_path)
    service: Any = None
    with pytest.raises(NetworkError, match="take another port"):
        Endpoint(service, "key", server.port)


def test_silent_connections_give_way(server):
    opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    try:
        assert server.ask("healthz", {})[0] == 200
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.parametrize("host", seldom([None, "localhost"], None))
def test_the_client_trains_samples_saves_and_loads(host, model, tmp_path):
    if host is not None:
        ensure_authority(KeyDirectory(tmp_path / FOLDER))
    with served(tmp_path, model, host=host) as server:
        assert ("SSL_CERT_FILE" in server.told) == server.url.startswith("https")
        program = str(Path(__file__).with_name("client_program.py"))
        told = {**os.environ, **server.told, "TINKER_TELEMETRY": "0"}
        command = [sys.executable, program, str(model)]
        done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=2 * WAIT_S)
        assert "all is well" in done.stdout, done.stdout + done.stderr
        (saved,) = (tmp_path / "out" / "sampler_weights").iterdir()
        assert PeftConfig.from_pretrained(saved).r == 8
    lines = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert [(line["step"], line["examples"]) for line in lines] == [(k, 4) for k in range(1, 6)]
    assert lines[-1]["sampled_tokens"] == 10
    assert lines[0]["loss"] > lines[3]["loss"]
    events = [line["what"] for line in read_rows(tmp_path / "out" / "events.jsonl")]
    assert events[:2] == ["session begun", "model made"]
