from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.config import load_config
from hetero_framework.config.strict_json import parse_object, read_object
from hetero_framework.errors import ConfigError
from hetero_framework.extras.yaml_files.strict_yaml import _Strict


def parsed(content: str | bytes, name: str = "c.yaml", **how: Any) -> dict[str, Any]:
    content = content.encode() if isinstance(content, str) else content
    return parse_object(content, name=name, **how)


def refusal(content: str | bytes, name: str = "c.yaml", **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(content, name, **how)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-4", 1e-4), ("1E5", 1e5), ("-0", 0), ("-12", -12), ("2.50", 2.5), ("1.0e+2", 100.0)),
        *(("true", True), ("False", False), ("null", None), ("~", None), ("", None)),
        *((word, word) for word in ("yes", "no", "on", "off", "Yes", "y", "nUll")),
        *((word, word) for word in ("010", "0x1F", "0o7", "1_000", "+1", ".5", "1.", "12:30:00")),
        *((word, word) for word in ("2026-01-31", "NaN", "inf", "=", "<<", "10.0.0.1")),
        *(('"1"', "1"), ("'true'", "true"), ('"a\\tb"', "a\tb"), ("|\n  x\n  y\n", "x\ny\n")),
        *(("[1, a]", [1, "a"]), ("{1: null}", {"1": None}), ("\n- 1\n- b: 2\n", [1, {"b": 2}])),
    ],
)
def test_a_value_is_that_of_json_or_a_text(text, value):
    found = parsed(f"a: {text}")
    assert found == {"a": value}
    assert type(found["a"]) is type(value) or isinstance(value, dict)


def test_keys_are_texts():
    assert parsed("1: a\ntrue: b\nnull: c\n1e3: d\n") == dict(
        zip(["1", "true", "null", "1e3"], "abcd", strict=True)
    )


@pytest.mark.parametrize(
    ("as_json", "as_yaml", "message"),
    [
        ("", "", "is empty"),
        ("[1]", "- 1", "must hold one object {...}, but holds a list"),
        ("3", "3", "must hold one object {...}, but holds a number"),
        ('{"a": 1,\n"a": 2}', "a: 1\na: 2\n", 'a: the key "a" is given twice; keep one'),
        (
            '{"s": {"seed": 1,\n\n"seed": 2}, "w": [{"b": 1,\n "b": 2}]}',
            "s: {seed: 1,\n\n  seed: 2}\nw: [{b: 1,\n  b: 2}]\n",
            's.seed: the key "seed" is given twice; keep one\n  w[0].b: the key "b" is given twice',
        ),
        ('{"a": [NaN]}', "a: [.nan]", "a[0]: the number is not finite"),
        ('{"a": {"b": -Infinity}}', "a:\n  b: -.inf\n", "a.b: the number is not finite"),
        ('{"a": 1e999}', "a: 1e999", "a: the number is not finite"),
        ('{"a": ' + "1" * 5000 + "}", "a: " + "1" * 5000, "holds a number that cannot be read"),
        ('{"a": ' + "[" * 5000, "a: " + "[" * 5000, "nested too deeply"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "a: " + "[" * 200 + "]" * 200, "too deeply"),
        (b'{\n"a": "\xe4"}', b"\na: \xe4", "line 2: byte 0xe4 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "a: 1".encode("utf-16"), "is UTF-16 text or binary"),
    ],
)
def test_the_same_mistake_has_the_same_message(as_json, as_yaml, message):
    of_json, of_yaml = refusal(as_json, "c.json"), refusal(as_yaml, "c.yaml")
    assert message in of_yaml
    assert of_yaml == of_json.replace("c.json", "c.yaml")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: found character '\\t'"),
        ("a: 1\n--- \nb: 2\n", "line 2, column 1: not valid YAML: found another document"),
        ("a: &x 1\n", "line 1, column 4: not valid YAML: anchors and aliases (& and *)"),
        ("b: &x {c: 1}\na:\n  <<: *x\n", "line 1, column 4: not valid YAML: anchors and aliases"),
        ("a: 1\nb: *x\n", "line 2, column 4: not valid YAML: anchors and aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", "column 4: not valid YAML: tags (here tag:"),
        ("a: !!float 1\n", "column 4: not valid YAML: tags"),
        ("a: ! 1\n", "column 4: not valid YAML: tags"),
        ("? [1]\n: 2\n", "line 1, column 3: not valid YAML: a key must be a text"),
        ("a: [1, 2\n", "line 2, column 1: not valid YAML: expected ',' or ']', but got '<stream"),
        ('a: "x\n', "line 2, column 1: not valid YAML: found unexpected end of stream"),
        ("a: b: c\n", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n b: 2\n", "line 2, column 3: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: \x07\n", "line 2, column 4: not valid YAML: this character may not stand"),
        ("a: @x\n", "line 1, column 4: not valid YAML: found character '@' that cannot start"),
    ],
)
def test_what_only_yaml_has_is_refused_with_its_place(content, expected):
    message = refusal(content)
    assert expected in message
    assert message.splitlines()[2].index("^") == int(message.split("column ")[1].split(":")[0]) + 3


def test_another_programs_file_is_read_as_it_reads_it():
    text = "d: &d {x: yes, y: 1}\ne: {<<: *d, y: 2}\nt: 1e-4\nw: 010\n"
    assert parsed(text, foreign=True) == {
        **{"d": {"x": True, "y": 1}, "e": {"x": True, "y": 2}},
        **{"t": "1e-4", "w": 8},
    }
    assert 'x.a: the key "a" is given twice' in refusal("{x: {a: 1,\n a: 2}}", foreign=True)
    assert "tags (here tag:yaml" in refusal("a: !!python/name:os.system x", foreign=True)
    assert "tags (here tag:yaml" in refusal("a: !!timestamp x", foreign=True)
    for text in ("2026-13-45", "2026-01-31", "2026-01-31 10:00:00", "=", "<<", "1e-4"):
        assert parsed(f"a: {text}\n{text.replace('<<', 'k')}: b", foreign=True)["a"] == text
    assert parsed("on: no\n1: ~\n010: 1:30", foreign=True) == {"on": False, "1": None, "010": 90}
    assert "a key must be a text" in refusal("{[1]: 2}", foreign=True)


@pytest.mark.parametrize(
    "level",
    [
        "a{0}: &a{0} [*a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}]\n",
        "a{0}: &a{0} {{x: *a{1}, y: *a{1}, z: [*a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}]}}\n",
        "a{0}: &a{0} {{<<: [*a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}], b: 1}}\n",
    ],
)
def test_aliases_write_out_to_no_more_than_a_configuration(level):
    first = "a0: &a0 {x0: 1}\n"
    bomb = first + "".join(level.format(n, n - 1) for n in range(1, 12))
    assert "its aliases write out to more than a configuration has" in refusal(bomb, foreign=True)
    harmless = first + "".join(level.format(n, 0) for n in range(1, 12))
    assert len(parsed(harmless, foreign=True)) == 12
    assert "its aliases write out" in refusal("a: &a [*a]", foreign=True)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that would be something else here, which are others than in YAML 1.1."""

    yaml_implicit_resolvers = _Strict.yaml_implicit_resolvers


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cn"))) | st.sampled_from(
    ["1e5", "no", "~", "null", "010", "<<", "- a", "a: b", "# c", "'", '"', " x ", "a\nb\n", "1.0"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(_TEXTS, _VALUES, max_size=4), st.sampled_from([None, False, True]))
def test_an_object_reads_the_same_from_yaml_and_json(raw, flow):
    dumped = yaml.dump(
        raw, Dumper=_Dumper, default_flow_style=flow, allow_unicode=True, sort_keys=False
    )
    of_json = parsed(json.dumps(raw), "c.json")
    assert repr(parsed(dumped)) == repr(of_json)
    assert repr(parsed(json.dumps(raw, ensure_ascii=False))) == repr(of_json)  # JSON is YAML


_PARTS = st.sampled_from(
    [
        *("ab{}[]|#?'\"=~-\\\t\n\x00\x85\u2028"),
        *(": ", "- ", "  ", ", ", "&x ", "*x", "<<: *x", "!!map ", "!!str ", "!!timestamp "),
        *("? ", "\n--- ", "...", "%YAML 1.1\n", "1e-4", "2026-13-45", "0x_"),
    ]
)


@given(st.lists(_PARTS, max_size=14).map("".join), st.booleans())
def test_any_text_is_an_object_or_refused_by_its_file(text, foreign):
    refused = None
    try:
        assert isinstance(parsed(text, foreign=foreign), dict)
    except ConfigError as error:
        refused = error.message
    assert refused is None or refused.startswith("c.yaml")


_CONFIG = {
    "coordinator": {"ip": "127.0.0.1", "port": 9999},
    "shard_plan": [{"id": "local", "start": 0, "end": 4}],
    "model": {"name_or_path": "m"},
    "data": {"train": "t.jsonl"},
    "training": {"learning_rate": 1e-4, "save_strategy": "no"},
}


def test_a_yaml_file_is_a_configuration_as_a_json_file_is(tmp_path):
    (of_json := tmp_path / "c.json").write_text(json.dumps(_CONFIG))
    (of_yaml := tmp_path / "c.yml").write_text(
        """# the same
coordinator: {ip: 127.0.0.1, port: 9999}
shard_plan:
- {id: local, start: 0, end: 4}
model:
  name_or_path: m
data: {train: t.jsonl}
training:
  learning_rate: 1e-4  # a text for PyYAML
  save_strategy: no
"""
    )
    changes = ["training.seed=7", "model.revision=main"]
    config = load_config(of_yaml, changes)
    assert config.to_dict() == load_config(of_json, changes).to_dict()
    assert (config.training.seed, config.base_dir) == (7, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("gradient_checkpointing: no", 'must be true or false or "auto", not the text "no"'),
        ("fp16: on", 'must be true or false, not the text "on"'),
        ("seed: 0x10", 'must be a whole number, not the text "0x10"'),
        ("weight_decay: 1_000", 'must be a number, not the text "1_000"'),
        ("log_level: 2026-01-31", '"2026-01-31" is not one of DEBUG, INFO'),
        ("no_such: 1", "unknown key"),
    ],
)
def test_words_of_yaml_are_refused_by_the_schema(wrong, message, tmp_path):
    (file := tmp_path / "c.yaml").write_text(json.dumps(_CONFIG)[:-2] + f", {wrong}}}}}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    name = wrong.partition(":")[0]
    assert str(caught.value).startswith(f"{file}: training.{name}: ")
    assert message in str(caught.value)


def test_a_configuration_may_be_a_dictionary(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = json.dumps(_CONFIG)
    config = load_config(_CONFIG, ["training.seed=7"])
    assert (config.training.seed, config.base_dir) == (7, tmp_path)
    assert load_config(_CONFIG, base_dir=tmp_path / "x").base_dir == tmp_path / "x"
    assert json.dumps(_CONFIG) == before
    with pytest.raises(ConfigError, match=r"configuration: training\.seed: must be a whole number"):
        load_config({**_CONFIG, "training": {"seed": "x"}})


def test_the_ending_says_which_a_file_is(tmp_path):
    (file := tmp_path / "fleet.yml").write_text("a: 1e3\n")
    assert read_object(file) == {"a": 1000.0}
    file = file.rename(tmp_path / "fleet.json")
    with pytest.raises(ConfigError, match=r"line 1, column 1: not valid JSON"):
        read_object(file)
