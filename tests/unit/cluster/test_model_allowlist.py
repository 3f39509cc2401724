"""Models that a coordinator may have a worker load: those named in the worker's own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cluster.model_allowlist import TINY, check_permitted
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.repository import resolve_model_path
from tests.unit.cluster.conftest import star


def config(base: Path, model: str | None, models: list[str] | None = None, **more: Any) -> Config:
    worker = {"id": 1, "ip": "127.0.0.1", "device": "cpu", "port": 9001, "models": models}
    sections = {} if model is None else {"model": {"name_or_path": model}}
    return star([worker], ["local", 1], base, **{**sections, **more})


def check(asked: Config, own: Config) -> Config:
    return check_permitted(asked, own, own.worker(1))


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
def test_models_named_in_the_workers_own_file_are_permitted(asked, own, models, tmp_path):
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
def test_other_models_are_refused_with_the_permitted_ones(asked, own, models, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(config(tmp_path, asked), config(tmp_path, own, models))
    said = caught.value.message
    assert f"worker 1 may not load the model {asked!r}" in said
    for name in ([own] if own else []) + (models or []):
        assert repr(name) in said
    assert '"models" of worker 1' in str(caught.value.hint)


def test_an_adapter_is_a_path_too(tmp_path):
    asked = config(tmp_path, "m", adapter={"init_from": "/srv/adapter"})
    with pytest.raises(ConfigError, match="may not load the adapter '/srv/adapter'"):
        check(asked, config(tmp_path, "m"))
    check(asked, config(tmp_path, "m", ["/srv/*"]))
    check(asked, asked)


def in_place(base: Path, fields: dict[str, Any], models: list[str] | None = None) -> Config:
    raw = config(base, None, models).to_dict()
    return Config.from_dict({**raw, "model": {"from_config": fields, "tokenizer": "t"}}, base)


def test_no_model_section_reads_no_file(tmp_path):
    check(config(tmp_path, "m").with_changes(model=None), config(tmp_path, "m"))


def test_a_model_in_place_is_permitted_as_it_stands_in_the_own_file(tmp_path):
    asked = in_place(tmp_path, {"model_type": "llama", "hidden_size": 64})
    check(asked, asked)
    check(asked, config(tmp_path, "m", ["*"]))
    others = (
        config(tmp_path, "m"),
        config(tmp_path, None, ["llama", "m*"]),
        in_place(tmp_path, {"model_type": "llama", "hidden_size": 65}),
    )
    for own in others:
        with pytest.raises(ConfigError, match=r"may not load the model of model\.from_config"):
            check(asked, own)


def test_the_tiny_model_of_a_measurement_is_permitted_and_no_larger_one(tmp_path):
    check(in_place(tmp_path, {**TINY, "num_hidden_layers": 2}), config(tmp_path, "m"))
    for more in ({"num_hidden_layers": 3}, {"num_hidden_layers": 2, "hidden_size": 64}):
        with pytest.raises(ConfigError):
            check(in_place(tmp_path, {**TINY, **more}), config(tmp_path, "m"))


@pytest.mark.parametrize(
    ("asked", "own", "models", "opened"),
    [
        ("m", "m", None, "job/m"),
        ("m/", "./m", None, "job/m"),
        ("link", "link", None, "disk/data"),
        ("link", "../disk/data", None, "disk/data"),
        ("../disk/data", "link", None, "disk/data"),
        ("link/../m", "m", None, "job/m"),
        ("shelf/a", None, ["shelf/*"], "disk/shelf/a"),
        ("../disk/shelf/a", None, ["shelf/*"], "disk/shelf/a"),
        ("disk/data", None, ["*"], None),
        ("link/../data", "m", None, None),
        ("m/away", None, ["m/*"], None),
        ("m/../link", None, ["m*"], None),
    ],
)
def test_the_path_that_is_checked_is_the_one_that_is_opened(asked, own, models, opened, tmp_path):
    job = tmp_path / "job"
    for folder in ("job/m", "disk/data", "disk/m", "disk/shelf/a"):
        (tmp_path / folder).mkdir(parents=True)
    for link, to in (("link", "disk/data"), ("shelf", "disk/shelf"), ("m/away", "disk/data")):
        (job / link).symlink_to(tmp_path / to, target_is_directory=True)
    if opened is None and models != ["*"]:
        with pytest.raises(ConfigError):
            check(config(job, asked), config(job, own, models))
        return
    found = check(config(job, asked), config(job, own, models))
    assert found.model is not None
    if opened is not None:
        (tmp_path / opened / "new").touch()
        assert (Path(resolve_model_path(str(found.model.name_or_path), job)) / "new").exists()
        assert found.model.name_or_path == os.path.realpath(tmp_path / opened)
    else:
        assert found.model.name_or_path == asked
