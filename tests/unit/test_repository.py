"""Settings of a model that would load code are refused before any library sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.errors import ModelError
from hetero_framework.repository import CONFIG, MAX_SETTINGS_BYTES, pickled, refuse_code

HARMLESS: list[dict[str, Any]] = [
    {},
    {"auto_map": {}, "custom_pipelines": None, "trust_remote_code": False},
    {"_attn_implementation": "flash_attention_2", "text_config": {"attn_implementation": None}},
    {"name_or_path": "somebody/model", "_name_or_path": "a/b"},
]
CODE: list[tuple[dict[str, Any], str]] = [
    ({"auto_map": {"AutoConfig": "a.B"}}, "auto_map"),
    ({"text_config": {"auto_map": {"AutoModel": "a.B"}}}, "text_config.auto_map"),
    *(({"auto_map": odd}, "auto_map") for odd in (None, [], [1], 0, 7, False, True, "", "x")),
    ({"vision_config": {"auto_map": None}}, "vision_config.auto_map"),
    ({"parts": [1, {"auto_map": "x"}]}, "parts[1].auto_map"),
    ({"custom_pipelines": {"p": {"impl": "a.B"}}}, "custom_pipelines"),
    ({"_attn_implementation_internal": "evil/kernel"}, "_attn_implementation_internal"),
    ({"_attn_implementation_internal": "sdpa"}, "_attn_implementation_internal"),
    ({"_experts_implementation_internal": "x"}, "_experts_implementation_internal"),
    ({"attn_implementation": "evil/kernel"}, "attn_implementation"),
    ({"_attn_implementation": {"": "evil/kernel:f"}}, "_attn_implementation"),
    ({"experts_implementation": "evil/kernel"}, "experts_implementation"),
    ({"trust_remote_code": True}, "trust_remote_code"),
    ({"configuration_files": ["config.1.0.json"]}, "configuration_files"),
    ({"custom_generate": "evil/decoding"}, "custom_generate"),
]


def check(folder: Path) -> None:
    refuse_code(str(folder), None, (CONFIG,), ModelError, "take another")


@pytest.mark.parametrize("fields", HARMLESS)
def test_harmless_settings_pass(fields, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(fields))
    check(tmp_path)


@pytest.mark.parametrize("file", [CONFIG, "processor_config.json"])
@pytest.mark.parametrize(("fields", "place"), CODE, ids=[place for _, place in CODE])
def test_settings_that_load_code_are_refused_with_file_and_place(fields, place, file, tmp_path):
    (tmp_path / file).write_text(json.dumps(fields))
    with pytest.raises(ModelError) as caught:
        check(tmp_path)
    assert str(tmp_path / file) in caught.value.message
    assert f"({place})" in caught.value.message
    assert caught.value.hint == "take another"


def test_deep_nesting_does_not_hide_a_code_key(tmp_path):
    (tmp_path / CONFIG).write_text('{"a":' * 400 + '{"auto_map": "x"}' + "}" * 400)
    with pytest.raises(ModelError, match="auto_map"):
        check(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / CONFIG).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelError, match=r"config\.json is a Git LFS pointer(.|\n)*git lfs pull"):
        check(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 99999, "\xff", "null"])
def test_invalid_settings_files_are_named(text, tmp_path):
    (tmp_path / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        check(tmp_path)


def test_settings_of_many_megabytes_are_not_read(tmp_path):
    with (tmp_path / CONFIG).open("wb") as file:
        file.truncate(MAX_SETTINGS_BYTES + 2**20)
    with pytest.raises(ModelError, match="has 17 MiB"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.safetensors", b"PK\x03\x04..", "a zip archive"),
        ("a.safetensors", b"\x80\x04}.", "pickled data"),
        ("a.safetensors", b"\x08\0\0\0\0\0\0\0{}      ", None),
    ],
)
def test_pickled_files_are_known_by_their_first_bytes(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    why = pickled(tmp_path / name)
    assert why is None if said is None else re.search(said, str(why))
