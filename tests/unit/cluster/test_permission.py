"""What a coordinator may have a worker load: what the worker's own file names, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cluster.permission import check_permitted
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError


def config(base: Path, model: str | None, models: list[str] | None = None, **more: Any) -> Config:
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    plan = [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}]
    sections = {} if model is None else {"model": {"name_or_path": model}}
    sections.update(more)
    worker = {**machine, "id": 1, "port": 9001, "models": models}
    return Config.from_dict(
        {"coordinator": machine, "workers": [worker], "shard_plan": plan, **sections}, base
    )


def check(asked: Config, own: Config) -> None:
    check_permitted(asked, own, own.worker(1))


@pytest.mark.parametrize(
    ("asked", "own", "models"),
    [
        ("meta-llama/A", "meta-llama/A", None),
        ("./model", "model", None),
        ("meta-llama/A", None, ["meta-llama/*"]),
        ("/data/models/a/b", None, ["/data/models/*"]),
        ("models/a", "other", ["models/*"]),
        ("/anything", None, ["*"]),
        (None, None, None),
    ],
)
def test_what_the_own_file_names_is_permitted(
    asked: str | None, own: str | None, models: list[str] | None, tmp_path: Path
) -> None:
    check(config(tmp_path / "coordinator's", asked), config(tmp_path / "own [1]", own, models))


@pytest.mark.parametrize(
    ("asked", "own", "models"),
    [
        ("/etc", None, None),
        ("/etc", "meta-llama/A", None),
        ("meta-llama/B", "meta-llama/A", None),
        ("meta-llama/../../../etc", None, ["meta-llama/*"]),
        ("/data/models/../secret", None, ["/data/models/*"]),
        ("/data/models", None, ["/data/models/*"]),
        ("~/x", None, ["x", "models/*"]),
        ("~nobody-at-all/x", None, ["x"]),
        ("*", "a", ["b"]),
        ("{0}", "A", None),
    ],
)
def test_anything_else_is_refused_and_both_are_named(
    asked: str, own: str | None, models: list[str] | None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(tmp_path, asked), config(tmp_path, own, models))
    said = caught.value.message
    assert f"worker 1 may not load the model {asked!r}" in said
    for name in ([own] if own else []) + (models or []):
        assert repr(name) in said
    assert '"models" of worker 1' in str(caught.value.hint)


def test_an_adapter_is_a_path_too(tmp_path: Path) -> None:
    asked = config(tmp_path, "m", adapter={"init_from": "/srv/adapter"})
    with pytest.raises(ConfigError, match="may not load the adapter '/srv/adapter'"):
        check(asked, config(tmp_path, "m"))
    check(asked, config(tmp_path, "m", ["/srv/*"]))
    check(asked, asked)


def test_random_weights_read_no_file(tmp_path: Path) -> None:
    random = {"from_config": {"model_type": "llama"}, "tokenizer": "t"}
    check(config(tmp_path, "m").with_changes(model=None), config(tmp_path, "m"))
    asked = Config.from_dict({**config(tmp_path, None).to_dict(), "model": random}, tmp_path)
    check(asked, config(tmp_path, "m"))
