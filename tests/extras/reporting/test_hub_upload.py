"""What an upload to the hub needs is looked for before a run begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hetero_framework.errors import ConfigError
from hetero_framework.extras.reporting.hub_upload import check, repository
from hetero_framework.trainer.coordinator import train
from tests.alone import Alone


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_what_is_missing_is_said_before_the_run(
    alone: Alone, output: str, settings: dict[str, Any], message: str, hint: str
) -> None:
    config = alone(output, training={"push_to_hub": True, **settings})
    with pytest.raises(ConfigError, match=message) as caught:
        train(config)
    assert hint.partition("|")[2] in caught.value.hint
    assert not config.output_dir.exists()
    check(config.with_changes(training={"push_to_hub": False}))


@pytest.mark.usefixtures("online")
def test_offline_mode_and_a_token(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    config = alone(training={"push_to_hub": True})
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    check(config)
    assert repository(config) == "run"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids uploads"):
        check(config)


def test_the_process_imports_no_torch() -> None:
    code = "import sys, hetero_framework.extras.reporting.hub_upload\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
