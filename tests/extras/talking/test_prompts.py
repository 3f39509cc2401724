"""Unit tests for extras/talking/prompts.py."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.data.formats import ALPACA_WITHOUT_INPUT
from hetero_framework.data.sources import Record
from hetero_framework.errors import ConfigError, DataError
from hetero_framework.extras.talking.prompts import Prompt, PromptReader, check_prompts, is_chat
from tests.unit.data_helpers import CHATML, make_config, tiny_tokenizer, write_jsonl

TOKENIZER = tiny_tokenizer(CHATML)
ASKED = [{"role": "user", "content": "What is two and two?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "It is four."}]


def read(chat: bool = True, **fields: Any) -> Prompt:
    return PromptReader(TOKENIZER, None, chat=chat)(Record("here", fields))


def rendered(messages: list[dict[str, str]]) -> tuple[int, ...]:
    found = TOKENIZER.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return tuple(found["input_ids"])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "What is two and two?"},
        {"text": "What is two and two?"},
        {"prompt": ASKED},
        {"messages": ASKED},
        {"messages": ANSWERED},
        {"prompt": ASKED, "completion": "It is four."},
    ],
    ids=str,
)
def test_a_question_is_rendered_as_the_template_has_it(fields):
    prompt = read(**fields)
    assert prompt == Prompt("What is two and two?", rendered(ASKED))


def test_a_text_stays_as_it_is_where_nobody_is_talked_to():
    text = "The quick brown"
    assert read(chat=False, text=text) == Prompt(text, tuple(TOKENIZER(text)["input_ids"]))
    asked = read(chat=False, instruction="Write a response.")
    whole = ALPACA_WITHOUT_INPUT.format(instruction="Write a response.")
    assert asked == Prompt("Write a response.", tuple(TOKENIZER(whole)["input_ids"]))


def test_a_system_prompt_beside_it_comes_first():
    system = {"role": "system", "content": "Be brief."}
    assert read(prompt="What is it?", system="Be brief.").ids == rendered(
        [system, {"role": "user", "content": "What is it?"}]
    )


def test_a_prompt_in_place_of_a_file_is_said_with_its_setting(tmp_path):
    reader = PromptReader(TOKENIZER, None, chat=True)
    with pytest.raises(DataError, match=r"^training.sample_prompts: .*the star\n.*in a list"):
        reader.read("the star", tmp_path, "training.sample_prompts")


def test_files_and_lists_are_read_alike(tmp_path):
    reader = PromptReader(TOKENIZER, None, chat=True)
    listed = reader.read(("What is it?", tuple(ASKED)), tmp_path, "prompts")
    write_jsonl(tmp_path / "asked.jsonl", [{"prompt": "What is it?"}, {"messages": ASKED}])
    assert reader.read("asked.jsonl", tmp_path, "prompts") == listed
    (tmp_path / "asked.txt").write_text("What is it?\nThe lazy dog\n")
    assert [p.text for p in reader.read("asked.txt", tmp_path, "prompts")] == [
        "What is it?",
        "The lazy dog",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"answer": "four"}, "here: no prompt among its fields: answer"),
        ({"messages": ANSWERED[1:]}, "here: messages has only messages of the assistant"),
        ({"prompt": 4}, "prompt must be a string"),
        ({"instruction": "What?", "system": "Be brief."}, "the field system would not be read"),
        ({"prompt": ASKED, "context": "A fox."}, "the field context would not be read"),
        ({"prompt": "What?", "images": ["a.png"]}, "has the field images"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(fields, said):
    with pytest.raises(DataError, match=said):
        read(**fields)


def test_prompts_without_room_for_a_token_are_refused():
    check_prompts([Prompt("a", (1, 2, 3))], 4, "prompts")
    with pytest.raises(DataError, match="prompts: prompt 2 has 4 tokens, and the model has 4 posi"):
        check_prompts([Prompt("a", (1,)), Prompt("b", (1,) * 4)], 4, "prompts")
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        check_prompts([Prompt("", ())], None, "prompts")


@pytest.mark.parametrize(
    ("row", "talks"),
    [
        ({"messages": ANSWERED}, True),
        ({"prompt": ASKED, "completion": ANSWERED[1:]}, True),
        ({"prompt": "What is it?", "completion": ANSWERED[1:]}, True),
        ({"text": "The lazy dog"}, False),
        ({"prompt": "What", "completion": " is it?"}, False),
    ],
    ids=["messages", "pairs of messages", "pairs of both", "text", "pairs"],
)
def test_the_training_data_say_whether_a_model_is_talked_to(row, talks, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [row])
    config = make_config(tmp_path, {"train": "train.jsonl"})
    assert is_chat(config, TOKENIZER) == talks
    assert not is_chat(config, tiny_tokenizer())
    (tmp_path / "train.jsonl").unlink()
    assert is_chat(config, TOKENIZER)


@pytest.mark.parametrize("objective", ["classification", "sequential"])
def test_only_models_that_generate_text_continue_prompts(objective):
    raw = {
        "coordinator": {"ip": "127.0.0.1"},
        "shard_plan": [{"id": "local", "start": 0, "end": 2}],
        "training": {"objective": objective, "sample_prompts": ["a"]},
    }
    with pytest.raises(ConfigError, match=r"sample_prompts: is for models that generate text"):
        Config.from_dict(raw)
    Config.from_dict({**raw, "training": {"objective": "dpo", "sample_prompts": ["a"]}})
