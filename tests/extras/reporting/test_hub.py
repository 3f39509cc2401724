"""Uploads to a hub on the loopback: what arrives, and what a hub that misbehaves costs a run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from huggingface_hub import constants

from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.errors import ConfigError
from hetero_framework.extras.reporting import hub as uploads
from hetero_framework.extras.reporting.hub import HubUploads
from hetero_framework.extras.reporting.hub_upload import check, repository
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.observers import Due, Observers, Placement, Watched
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.train_state import TrainState
from tests.cases import seldom
from tests.hub_server import TOKEN, serving_hub
from tests.pools import leaving_nothing

PUSHES = {"push_to_hub": True, "hub_model_id": "me/result"}
SAVES = {"save_strategy": "steps", "save_steps": 1, "hub_private_repo": True}


@pytest.fixture
def hub(monkeypatch):
    with leaving_nothing(), serving_hub(monkeypatch) as served:
        yield served


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def log_of(config: Config) -> list[str]:
    return (config.output_dir / "logs" / "coordinator.log").read_text().splitlines()


def missing(lines: list[str]) -> list[str]:
    return [line for line in lines if "is not on the hub" in line]


def test_the_result_is_uploaded_whole_and_the_token_stays(alone, hub, tmp_path):
    config = alone(training=PUSHES)
    summary = train(config)
    assert hub.repositories == {"me/result": contents(summary.files["model"])}
    assert hub.private == {"me/result": False}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]
    assert str(tmp_path).encode() not in hub.bodies
    assert log_of(config)[-1].endswith(f"INFO uploaded the model to {hub.address}/me/result")
    events = (config.output_dir / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["what"] == "uploaded"


@pytest.mark.long
def test_the_repository_is_named_after_output_dir(alone, hub):
    train(alone("lora-1", training={"push_to_hub": True, "hub_private_repo": True}))
    assert hub.private == {"me/lora-1": True}


@pytest.mark.long
def test_a_branch_is_made_and_gets_the_result(alone, hub):
    train(alone(training={**PUSHES, "hub_revision": "trial"}))
    assert [revision for revision, *_ in hub.commits] == ["trial"]


def test_the_newest_checkpoint_is_uploaded_and_resumed(alone, hub, tmp_path):
    config = alone(training={**PUSHES, **SAVES, "hub_strategy": "checkpoint"})
    hub.repositories["me/result"], hub.private["me/result"] = {"last-checkpoint/old": b""}, True
    summary = train(config)
    arrived = hub.repositories["me/result"]
    last = {p.removeprefix("last-checkpoint/"): f for p, f in arrived.items() if "/" in p}
    assert last == contents(config.checkpoints / "step_4")
    assert {p: f for p, f in arrived.items() if "/" not in p} == contents(summary.files["model"])
    step = json.loads(last["manifest.json"])["step"]
    again = alone("again", training={**SAVES, "max_steps": 5})
    folder = again.checkpoints / f"step_{step}"
    folder.mkdir(parents=True)
    for name, data in last.items():
        (folder / name).write_bytes(data)
    assert len(train(again, resume="latest").losses) == 1


@pytest.mark.long
def test_all_checkpoints_have_folders_of_their_own(alone, hub):
    config = alone(training={**PUSHES, **SAVES, "hub_strategy": "all_checkpoints"})
    train(config)
    arrived = {path.partition("/")[0] for path in hub.repositories["me/result"] if "/" in path}
    assert "step_4" in arrived <= {"step_1", "step_2", "step_3", "step_4"}


@pytest.mark.long
def test_a_public_repository_gets_no_checkpoint(alone, hub):
    more = {"hub_strategy": "checkpoint", "hub_private_repo": None}
    config = alone(training={**PUSHES, **SAVES, **more})
    summary = train(config)
    assert hub.repositories == {"me/result": contents(summary.files["model"])}
    (said,) = missing(log_of(config))
    assert "make me/result private" in said
    assert "hf upload" not in said


@pytest.mark.parametrize("fail", seldom((401, 403, 500, "close"), 401, 403, 500))
def test_a_hub_that_refuses_costs_no_step_and_is_told(alone, hub, fail):
    usual = train(alone("usual", training=SAVES))
    hub.fail = fail
    config = alone(training={**PUSHES, **SAVES, "hub_strategy": "checkpoint"})
    summary = train(config)
    assert summary.losses == usual.losses
    assert contents(summary.files["model"]).keys() == contents(usual.files["model"]).keys()
    first, last = missing(log_of(config))
    assert "the repository is not on the hub" in first
    command = f"hf upload me/result {summary.files['model']} --private"
    assert last.endswith(f". To upload it: {command}")
    assert str(fail) in last or fail == "close"
    files = [file for file in config.output_dir.rglob("*") if file.is_file()]
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]


def test_a_hub_that_is_away_is_told(alone, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    config = alone(training=PUSHES)
    assert train(config).steps == 4
    assert len(missing(log_of(config))) == 2


@pytest.mark.long
def test_a_hub_that_hangs_slows_no_step_and_is_left(alone, hub, monkeypatch):
    """It is asked before the first step; time passes for uploads when there are no more steps."""
    hub.fail = "hang"
    monkeypatch.setattr(timeouts, "UPLOAD_S", 2.0)
    begin, finished, steps_are_done = HubUploads.begin, HubUploads.finished, threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if steps_are_done.is_set() else 0.0)
    monkeypatch.setattr(uploads, "time", clock)

    def begun(self: HubUploads, *of_run: Any) -> None:
        begin(self, *of_run)
        assert hub.is_asked.wait(60)

    def ended(self: HubUploads, *of_run: Any) -> None:
        steps_are_done.set()
        finished(self, *of_run)

    monkeypatch.setattr(HubUploads, "begin", begun)
    monkeypatch.setattr(HubUploads, "finished", ended)
    config = alone(training={**PUSHES, **SAVES, "hub_strategy": "checkpoint"})
    train(config)
    first, last = missing(log_of(config))
    assert "it took too long" in first
    assert "the model is not on the hub: it took too long. To upload it: hf upload" in last


@contextmanager
def observer(config: Config, *, stop: bool = False) -> Iterator[HubUploads]:
    store = CheckpointStore(config.checkpoints, config.training.save_total_limit)
    placed = Placement(cast(Prepared, SimpleNamespace(config=config)), {})
    pushing = HubUploads(Watched(placed, store, lambda: stop))
    with Observers() as observers:
        observers.watch([pushing])
        yield pushing


def saved(store: CheckpointStore, step: int) -> TrainState:
    with store.begin(step) as writer:
        writer.commit({})
    return TrainState(step=step)


def test_a_checkpoint_stays_while_it_is_uploaded_and_a_newer_one_is_next(alone, hub, logged):
    hub.fail = "hang"
    limits = {"save_total_limit": 1, "hub_strategy": "checkpoint"}
    config = alone(training={**PUSHES, **SAVES, **limits})
    config.result_dir.mkdir(parents=True)
    (config.result_dir / "README.md").write_text("a card")
    with observer(config) as pushing:
        store = pushing._store
        pushing._next = []
        for step in (1, 2, 3):
            pushing.saved(saved(store, step), Due())
        assert hub.is_asked.wait(60)
        assert store.complete_steps() == [1, 3]  # the first is being read, the second gave way
        hub.fail = None
        hub.goes_on.set()
        pushing.finished(TrainState(step=3), {})
    assert store.complete_steps() == [3]
    messages = [message for _, message, _ in hub.commits]
    assert messages == ["Upload checkpoint 1", "Upload the model", "Upload checkpoint 3"]
    arrived = hub.repositories["me/result"]["last-checkpoint/manifest.json"]
    assert arrived == (config.checkpoints / "step_3" / "manifest.json").read_bytes()
    assert missing(logged) == []


def test_a_run_that_is_stopped_or_fails_leaves_its_uploads(alone, hub, logged):
    hub.fail = "hang"
    config = alone(training={**PUSHES, **SAVES, "hub_strategy": "checkpoint"})
    began = time.monotonic()
    with observer(config, stop=True) as pushing:
        pushing._look()
        pushing.finished(TrainState(), {})
    with observer(config) as pushing:
        pushing._next = []
        pushing.saved(saved(pushing._store, 1), Due())
    assert time.monotonic() - began < 60
    told = missing(logged)
    assert [line.partition(". To")[0].partition(": ")[2] for line in told] == [
        "the run was told to stop",
        "the run was told to stop",
        "the run has ended",
    ]


def test_an_island_that_does_not_save_uploads_nothing(alone, hub):
    with observer(alone(training=PUSHES)) as pushing:
        pushing._next = []
        pushing.trained(TrainState(), Due(is_saver=False))
        pushing.finished(TrainState(), {})
    assert not hub.is_asked.is_set()


def test_a_process_that_cannot_be_started_is_told(alone, hub, monkeypatch):
    monkeypatch.setattr(uploads.sys, "executable", "/does/not/exist")
    config = alone(training=PUSHES)
    assert train(config).steps == 4
    assert len(missing(log_of(config))) == 2


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A machine that may ask the hub, and has no token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("output", "settings", "message", "hint"),
    [
        ("run", {}, "there is no token of the hub on this machine", "HF_TOKEN"),
        ("my run", {}, "'my run' is no name on the hub", "hub_model_id|OWNER/NAME"),
        ("run", {"hub_model_id": "a/b/c"}, "'a/b/c' is no name on the hub", "OWNER/NAME"),
    ],
)
def test_what_is_missing_is_said_before_the_run(alone, output, settings, message, hint):
    config = alone(output, training={"push_to_hub": True, **settings})
    with pytest.raises(ConfigError, match=message) as caught:
        train(config)
    assert hint.partition("|")[2] in caught.value.hint
    assert not config.output_dir.exists()
    check(config.with_changes(training={"push_to_hub": False}))


@pytest.mark.usefixtures("online")
def test_offline_mode_and_a_token(alone, monkeypatch):
    config = alone(training={"push_to_hub": True})
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    check(config)
    assert repository(config) == "run"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids uploads"):
        check(config)


def test_the_process_imports_no_torch():
    code = "import sys, hetero_framework.extras.reporting.hub_upload\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
