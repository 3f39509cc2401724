from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import strict_json
from hetero_framework.config.strict_json import join_path, json_type, parse_object, read_object
from hetero_framework.errors import ConfigError


def parsed(content: str | bytes) -> dict[str, Any]:
    content = content.encode() if isinstance(content, str) else content
    return parse_object(content, name="config.json")


def refusal(content: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(content)
    return str(caught.value)


def test_a_valid_object_is_parsed():
    value = {"a": [1, 2.5, None, True], "b": {"c": "\u00e4", "d": {}}}
    content = '{"a": [1, 2.5, null, true], "b": {"c": "\u00e4", "d": {}}}'
    assert parsed(content) == value
    assert parsed(b"\xef\xbb\xbf" + content.encode()) == value


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("[1]", "must hold one object {...}, but holds a list"),
        ('{\n  "a": [1, 2,]\n}', "config.json, line 2, column 1"),  # 13 or 14, by the Python
        ('{\n  // note\n  "a": 1\n}', "line 2, column 3: not valid JSON: "),
        ("{'a': 1}", "double quotes"),
        ("coordinator:\n  ip: 10.0.0.1\n", "line 1, column 1: not valid JSON: "),
        ('{"a": 1 "b": 2}', "line 1, column 9: not valid JSON: Expecting ',' delimiter"),
        ('{"a": {"b": 1}', "line 1, column 15: not valid JSON: "),
        ('{"a": 1, "a": 2}', 'a: the key "a" is given twice'),
        ('{"training": {"seed": 1, "seed": 2}}', 'training.seed: the key "seed" is given twice'),
        ('{"training": {"learning_rate": NaN}}', "training.learning_rate: the number is not fin"),
        ('{"a": [Infinity]}', "a[0]: the number is not finite"),
        ('{"a": 1e999}', "a: the number is not finite"),
        ('{"a": ' + "1" * 5000 + "}", "holds a number that cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16 text or binary; save it as UTF-8"),
        (b'{\n"a": "\xe4"}', "line 2: byte 0xe4 is not UTF-8"),
        (b"\x00\x01\x02\x03", "binary"),
    ],
)
def test_broken_file_names_line_and_cause(content, expected):
    assert expected in refusal(content)
    assert len(refusal(content).splitlines()) <= 5


def test_broken_line_is_shown_with_a_marker():
    lines = refusal('{\n  "port": 12x\n}').splitlines()
    assert lines[1].endswith('"port": 12x')
    assert lines[2].index("^") == lines[1].index("x")


def test_every_fault_is_reported():
    with pytest.raises(ConfigError) as caught:
        parsed('{"a": [' + "NaN, " * 29 + "NaN]}")
    lines = str(caught.value).splitlines()
    assert lines[0] == "config.json is not acceptable:"
    assert len(lines) == 31
    assert lines[30].startswith("  a[29]: the number is not finite")


def test_a_long_line_is_shown_around_the_fault():
    shown, marker = refusal('{"a": "' + "x" * 500 + '", "b": y}').splitlines()[1:]
    assert len(shown) <= 104
    assert shown[marker.index("^")] == "y"


def test_a_file_of_unlikely_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_FILE_BYTES", 1 << 20)
    (file := tmp_path / "model.safetensors").write_bytes(b"{}".ljust(1 << 20))
    assert read_object(file) == {}
    file.write_bytes(b"{}".ljust((1 << 20) + 1))
    with pytest.raises(ConfigError, match="more than the 1 MiB of the largest configuration"):
        read_object(file)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (True, "a boolean (true/false)"),
        (1, "a number"),
        (1.5, "a number"),
        ("x", "a text"),
        ((1,), "a list [...]"),
        ({}, "an object {...}"),
        (None, "null"),
        (b"x", "bytes"),
    ],
)
def test_types_have_their_json_names(value, name):
    assert json_type(value) == name


def test_join_path_names_keys_and_indices():
    assert join_path("", "workers") == "workers"
    assert join_path("workers", 0) == "workers[0]"
    assert join_path("workers[0]", "port") == "workers[0].port"
