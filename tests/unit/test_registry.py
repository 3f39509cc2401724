"""The registry: manifests as they are, and what a name that cannot be found says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_framework import registry
from hetero_framework.errors import ConfigError
from hetero_framework.versions import has
from tests.installed import needs

ROOT = Path(__file__).resolve().parents[2]
KINDS = sorted(registry._tables())
ENTRIES = [(kind, name) for kind in KINDS for name in registry.entries(kind)]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_is_there(kind, name):
    """Or the extra that is away and that it uses is named."""
    needed = registry.facts(kind, name).get("needs")
    if needed and not has(needed):
        pytest.skip(f"{needed} is not installed")
    try:
        if kind == "commands":
            assert registry.command(name).run
        elif ":" in registry.entries(kind)[name].text:
            assert registry.find(kind, name) is not None
    except ConfigError as error:
        [away] = re.findall(r"the extra '(\w+)'", error.message)
        assert not registry.is_installed(away)


def test_names_alone_import_no_extra():
    program = (
        "import sys; from hetero_framework import registry\n"
        "names = [(kind, registry.names(kind)) for kind in registry._tables()]\n"
        "print([name for name in sys.modules if '.extras' in name or name == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_registered_name_comes_with_its_facts(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    assert not registry.has("objectives", "own")
    registry.register("objectives", "own", ROOT, data="text")
    assert registry.find("objectives", "own") is ROOT
    assert registry.facts("objectives", "own") == {"data": "text"}
    assert registry.names("objectives")[-1] == "own"


@needs("talking")
def test_a_missing_extra_is_named(monkeypatch):
    def absent(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(registry.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="the command 'chat' needs the extra 'talking'"):
        registry.command("chat")


def test_a_name_that_two_extras_add_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_ROOT", tmp_path)
    extra = tmp_path / "extras" / "other"
    extra.mkdir(parents=True)
    (tmp_path / "heart.toml").write_text('[files]\n".a" = "a:b"\n')
    (extra / "extra.toml").write_text('[files]\n".a" = "c:d"\n')
    (tmp_path / "__init__.py").touch()
    with pytest.raises(ImportError, match=r"extra.toml: its folder has no __init__.py"):
        registry._tables.__wrapped__()
    (extra / "__init__.py").touch()
    with pytest.raises(ImportError, match=r"extra.toml: files has '.a' twice"):
        registry._tables.__wrapped__()
