"""A file's schema holds the settings of the extras that it asks for, and of no others."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hetero_framework import registry
from hetero_framework.config import Config, TrainingConfig
from hetero_framework.config.composition import whole_schema, with_extras
from hetero_framework.config.objectives import needs_of
from hetero_framework.errors import ConfigError
from tests.installed import needs, whole

PreferenceSettings = pytest.importorskip(
    "hetero_framework.extras.preferences.settings"
).PreferenceSettings
ReportSettings = pytest.importorskip("hetero_framework.extras.reporting.settings").ReportSettings

PLAIN: dict[str, Any] = {
    "coordinator": {"ip": "127.0.0.1"},
    "shard_plan": [{"id": "local", "start": 0, "end": 2}],
    "model": {"name_or_path": "m"},
    "adapter": {"r": 4},
    "data": {"train": "a"},
    "training": {"max_steps": 3},
}
pytestmark = needs("islands")
ISLAND = {"name": "a", "lighthouse": "127.0.0.1:29510"}


def test_a_plain_file_loads_no_extra():
    code = (
        "import sys; from hetero_framework.config import Config, effects\n"
        f"config = Config.from_dict({PLAIN | {'island': None}!r})\n"
        "config = Config.from_dict(config.to_dict()).with_changes(training={'seed': 7})\n"
        "assert config.warnings() == () and type(config) is Config\n"
        "assert all(effects.effect_of(name, config) for name in effects.flat(config.to_dict()))\n"
        "print([name for name in sys.modules if name.startswith('hetero_framework.extras')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_section_of_an_extra_is_in_the_schema_of_files_that_have_it():
    config = Config.from_dict({**PLAIN, "island": ISLAND})
    assert type(config).extras == {"islands"}
    assert config.setting("island.sync_steps") == 1
    assert isinstance(config, Config)
    assert isinstance(config.training, TrainingConfig)
    again = Config.from_dict(config.to_dict())
    assert again == config
    assert type(again) is type(config)
    assert config.with_changes(island={"sync_steps": 8}).setting("island.sync_steps") == 8
    assert config.with_changes(island=None).setting("island") is None


def forget() -> None:
    for cached in (with_extras, whole_schema, registry.is_installed):
        cached.cache_clear()


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of an extra fail, as if its folder had been taken away."""
    package = f"hetero_framework.extras.{name}"
    for module in [m for m in sys.modules if m.partition(f"{package}.")[1] or m == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    forget()


@pytest.fixture(autouse=True)
def _compose_anew():
    yield
    forget()


def test_a_section_of_an_extra_that_is_not_there_is_said_with_its_name(monkeypatch):
    without("islands", monkeypatch)
    assert type(Config.from_dict({**PLAIN, "island": None})) is Config
    with pytest.raises(
        ConfigError, match=r"^island needs the extra 'islands', which this installation"
    ):
        Config.from_dict({**PLAIN, "island": ISLAND})
    monkeypatch.setattr(
        registry, "_tables", lambda: {"extras": {"island": registry.Registered("", "islands")}}
    )
    with pytest.raises(ConfigError, match=r"island: it needs the extra .islands., which"):
        Config.from_dict({**PLAIN, "island": ISLAND})


@whole
def test_an_objective_of_an_extra_that_is_not_there_is_said_with_its_name(monkeypatch):
    without("preferences", monkeypatch)
    with pytest.raises(ConfigError, match=r"^training\.objective: 'dpo' needs the extra 'pref"):
        Config.from_dict({**PLAIN, "training": {"objective": "dpo"}})
    assert Config.from_dict({**PLAIN, "training": {"run_name": "a"}}).setting("training.run_name")
    kept = {k: dict(v) for k, v in registry._tables().items()}
    for kind in kept.values():
        for name in [name for name, entry in kind.items() if entry.extra == "preferences"]:
            del kind[name]
    monkeypatch.setattr(registry, "_tables", lambda: kept)
    forget()
    with pytest.raises(ConfigError, match=r"training\.beta: unknown key, unless .* preferences$"):
        Config.from_dict({**PLAIN, "training": {"beta": 0.2}})
    with pytest.raises(ConfigError, match=r"^training\.objective: 'dpo' needs the extra 'pref"):
        needs_of("dpo")


def test_settings_of_extras_are_there_where_they_are_read_or_given():
    plain = Config.from_dict(PLAIN)
    assert plain.setting("training.beta") is None
    assert PreferenceSettings.of(plain.training).beta == 0.1
    config = Config.from_dict({**PLAIN, "training": {"objective": "dpo"}})
    assert type(config).extras == {"preferences"}
    assert PreferenceSettings.of(config.training) is config.training
    assert ReportSettings.of(config.training).run_name is None, "another extra's are left out"
    unread = Config.from_dict({**PLAIN, "training": {"beta": 0.2, "rpo_alpha": None}})
    assert type(unread) is whole_schema(Config)
    assert [line.partition(" has")[0] for line in unread.warnings()] == ["training.beta"]
    own = Config.from_dict({**PLAIN, "training": {"objective": "mine"}})
    assert own.setting("training.beta") == 0.1
