"""Sessions and their calls, answered by a service whose model computes nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.errors import UserError
from hetero_framework.extras.tinker import service as module
from hetero_framework.extras.tinker.datums import Limits
from hetero_framework.extras.tinker.service import KNOWN_VERSIONS, Refused, Service
from tests.extras.tinker.calling import ADAM, drawn, request

pytest.importorskip("tinker")


class Model(SimpleNamespace):
    """Counts calls; the sums of the client's losses are theirs."""

    limits, rows, kind, done, durable, steps = Limits(320, 128), 4, "llama", 0, 0, 0

    def make(self, lora: Any, **more: Any) -> None:
        self.made = lora

    def optim_step(self, adam: Any, number: int) -> dict[str, float]:
        self.done = number
        return {"number": number}

    def forward_backward(self, call: Any) -> Any:
        raise self.fault


@pytest.fixture
def service(tmp_path):
    return Service(Model(), "tiny", tmp_path)


def ask(service: Service, path: str, body: Any) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return service.handle(path, raw)


def result(service: Service, path: str, body: Any) -> Any:
    """The answer to a call, which is done at once."""
    promise = ask(service, path, body)
    service.run(service._queue.empty)
    return ask(service, "retrieve_future", {"request_id": promise["request_id"]})


def session(service: Service, version: str = "0.38.0") -> str:
    told = {"tags": [], "user_metadata": None, "sdk_version": version}
    return str(ask(service, "create_session", told)["session_id"])


def model_of(service: Service, session: str) -> Any:
    about = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    return result(service, "create_model", {**about, "lora_config": {"rank": 4, "seed": 1}})


def step(model: str, number: int, **changes: float) -> dict[str, Any]:
    return {"model_id": model, "seq_id": number, "adam_params": {**ADAM, **changes}}


def test_a_client_that_vanishes_keeps_the_model_for_the_stated_time(service, monkeypatch):
    first, second = session(service), session(service)
    assert "model_id" in model_of(service, first)
    assert "is free once" in model_of(service, second)["error"]
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.SILENCE_S - 1)
    third = session(service)
    assert "is free once" in model_of(service, third)["error"]
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.SILENCE_S + 1)
    assert model_of(service, session(service))["model_id"].partition(":")[0] not in (first, third)
    assert "is not the model" in result(service, "optim_step", step(f"{first}:train:0", 2))["error"]


def test_a_client_that_ends_its_session_frees_the_model(service):
    first, second = session(service), session(service)
    held = model_of(service, first)["model_id"]
    ask(service, f"sessions/{first}/finish", {"reason": {"type": "success"}, "detail": None})
    assert "model_id" in model_of(service, second)
    with pytest.raises(Refused, match="there is no session"):
        ask(service, "optim_step", step(held, 1))


def test_a_second_client_of_a_session_is_refused(service):
    held = model_of(service, session(service))["model_id"]
    done = result(service, "optim_step", step(held, 1))
    assert result(service, "optim_step", step(held, 1)) == done  # a client that asks again
    with pytest.raises(Refused, match="is there a second client"):
        ask(service, "optim_step", step(held, 1, learning_rate=2e-2))
    calls = [request(drawn(seed, 2, "weights"), "cross_entropy", held, 2) for seed in (1, 2)]
    ask(service, "forward_backward", calls[0].SerializeToString())
    with pytest.raises(Refused, match="is there a second client"):
        ask(service, "forward_backward", calls[1].SerializeToString())


@pytest.mark.parametrize("fault", [KeyError("x"), ValueError("x"), RuntimeError("x")])
def test_what_fails_here_is_not_called_the_clients_mistake(fault, service, caplog):
    held = model_of(service, session(service))["model_id"]
    service._model.fault = fault
    asked = request(drawn(1, 2, "weights"), "cross_entropy", held, 1).SerializeToString()
    answer = result(service, "forward_backward", asked)
    assert answer == {**answer, "category": "server"}
    assert "a call of forward_backward failed" in caplog.text
    service._model.fault = UserError("too long", hint="make it shorter")
    asked = request(drawn(1, 2, "weights"), "cross_entropy", held, 2).SerializeToString()
    told = {"error": "too long (make it shorter)", "category": "user"}
    assert result(service, "forward_backward", asked) == told


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("optim_step", {"seq_id": 1}, "only Adam's numbers are supported"),
        ("optim_step", step("MODEL", 1, beta3=1), "optim_step: beta3: Extra inputs"),
        ("optim_step", {**step("MODEL", 1), "seq_id": None}, "the field int"),
        ("save_weights", {"seq_id": 1}, "save_weights: model_id: Field required"),
        ("load_weights", {"path": 1, "optimizer": True}, "load_weights: path: Input should be"),
        ("asample", {"prompt": [1]}, "asample: prompt: Input should be"),
        ("create_model", {"session_id": "x"}, "create_model: model_seq_id: Field required"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(path, body, said, service):
    held = model_of(service, session(service))["model_id"]
    body = {name: held if value == "MODEL" else value for name, value in body.items()}
    with pytest.raises(Refused, match=said) as refused:
        ask(service, path, body)
    assert refused.value.status == 422


def test_the_oldest_and_the_newest_allowed_client_get_a_session_and_no_other(service):
    for known in KNOWN_VERSIONS:
        assert session(service, f"{known}0") != session(service, f"{known}99")
    for version in ("0.37.9", "0.39.0", "1.0.0", ""):
        with pytest.raises(Refused, match="is not known here"):
            session(service, version)


def test_the_base_model_of_a_sampler_is_told(service):
    told = {"session_id": session(service), "sampling_session_seq_id": 0, "base_model": "tiny"}
    id = ask(service, "create_sampling_session", told)["sampling_session_id"]
    about = {"sampler_id": id, "base_model": "tiny", "model_path": None}
    assert ask(service, f"samplers/{id}", b"") == about


def test_of_failed_calls_only_those_of_the_client_are_done_again(service):
    model = model_of(service, session(service))["model_id"]
    done: list[int] = []

    def fails(adam: Any, number: int) -> Any:
        done.append(number)
        raise errors[number]

    errors = {2: UserError("a gradient is not finite"), 3: RuntimeError("a bug")}
    service._model.optim_step = fails
    assert [result(service, "optim_step", step(model, n))["category"] for n in (1, 2)] == [
        "user",
        "server",
    ]
    service._repeat(0, 3)
    assert done == [2, 3, 2]
