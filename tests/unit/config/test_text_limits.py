"""Texts that no setting may contain."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config.text_limits import text_problems


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("$HOME/model", "$HOME is not replaced here"),
        ("/data/${USER}/model", "${USER} is not replaced here"),
        ("%USERPROFILE%\\model", "%USERPROFILE% is not replaced here"),
        ("file:///data/model", "file: is how a URL begins"),
        ("'/data/model'", "' is a quote"),
        ('"/data/model', '" is a quote'),
        ("/data/model ", "begins or ends with a space"),
        ("~/model", None),
        ("C:\\models\\llama", None),
        ("/data/my model (1) & more", None),
        ("org/name-1.5", None),
    ],
)
def test_shell_expansions_are_refused_in_paths(path, said):
    places: list[dict[str, Any]] = [
        {"model": {"name_or_path": path}},
        {"model": {"tokenizer": path}},
        {"adapter": {"init_from": path}},
        {"data": {"train": ["a.jsonl", path]}},
        {"data": {"chat_template_path": path}},
        {"training": {"output_dir": path}},
        {"checkpoint_dir": path},
    ]
    for place in places:
        found = [problem.text for problem in text_problems(place)]
        assert len(found) == (said is not None), place
        assert said is None or said in found[0]


def test_other_texts_may_contain_shell_characters():
    assert not list(
        text_problems({"data": {"dataset_text_field": "$x"}, "training": {"optim": " "}})
    )


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_numbers_beyond_those_of_machines_are_refused(number):
    for place in (
        {"training": {"seed": number}},
        {"data": {"chat_template_kwargs": {"a": [number]}}},
    ):
        (found,) = text_problems(place)
        assert "beyond 64 bits" in found.text
    assert not list(text_problems({"training": {"max_steps": 2**63 - 1, "bf16": True}}))
