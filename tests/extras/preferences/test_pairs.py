"""Preferences in the layouts that people have: each is trained on whole, as TRL does, or refused
with the field that would be lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from trl import DPOTrainer

from hetero_framework.data.examples import Examples
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import DataError
from tests.unit.data_helpers import CHATML, make_config, tiny_tokenizer, write_jsonl

KTO = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
Row = dict[str, Any]


def turn(role: str, text: str, **more: Any) -> Row:
    return {"role": role, "content": text, **more}


ASKED, GOOD, BAD = turn("user", "What is it?"), turn("assistant", "A fox."), turn("assistant", "No")
SYSTEM, MORE = turn("system", "Be brief."), [turn("assistant", "So?"), turn("user", "Say it.")]
TEXTS = {"prompt": "What is it?", "chosen": " A fox.", "rejected": " No"}
ANSWERS = {"chosen": TEXTS["chosen"], "rejected": TEXTS["rejected"]}
CHATS = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
RATED = {"prompt": "What is it?", "completion": " A fox.", "label": True}
SFT = {"prompt": "What is it?", "completion": " A fox."}
OBJECTIVES = {
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), ANSWERS),
    "kto": {name: RATED[name] for name in ("completion", "label")},
    "sft": {"completion": " A fox."},
}


def load(folder: Path, rows: list[Row], objective: str = "dpo", **data: Any) -> TrainData:
    write_jsonl(folder / "train.jsonl", rows)
    more = KTO if objective == "kto" else {}
    config = make_config(folder, {"train": "train.jsonl", **data}, objective=objective, **more)
    return load_data(config, tiny_tokenizer(CHATML))


def rows_of(data: TrainData) -> Examples:
    rows = getattr(data.examples, "rows", data.examples)
    assert isinstance(rows, Examples)
    return rows


def pieces(data: TrainData, number: int) -> tuple[str, str]:
    """Prompt and answer of a row."""
    rows, tokenizer = rows_of(data), tiny_tokenizer()
    span = slice(*rows.offsets[number : number + 2])
    ids, trained = rows.ids[span], rows.trained[span]
    return tokenizer.decode(ids[~trained]), tokenizer.decode(ids[trained])


def by_trl(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each row, by DPOTrainer."""
    tokenizer, trainer = tiny_tokenizer(CHATML), DPOTrainer.__new__(DPOTrainer)
    trainer._tokenizer = tokenizer
    arguments: Any = SimpleNamespace(max_length=None, dataset_num_proc=None)
    made = trainer._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, arguments, "train")
    return [
        (row["prompt_ids"], row[f"{name}_ids"]) for row in made for name in ("chosen", "rejected")
    ]


WHOLE = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
WITH_SYSTEM = {name: [SYSTEM, *WHOLE[name]] for name in WHOLE}
LONG = {"chosen": [ASKED, *MORE, GOOD], "rejected": [ASKED, *MORE, BAD]}
SHAREGPT = {"from": "human", "value": "What is it?"}
GPT = {"chosen": {"from": "gpt", "value": "A fox."}, "rejected": {"from": "gpt", "value": "No"}}


@pytest.mark.parametrize("objective", ["dpo", "reward", "kto"])
@pytest.mark.parametrize(
    ("row", "as_trl_has_it"),
    [
        (TEXTS, TEXTS),
        (CHATS, CHATS),
        (WHOLE, WHOLE),
        ({**WHOLE, "prompt": None, "question": "", "system": None, "tools": []}, WHOLE),
        ({**WHOLE, "prompt": "What is it?"}, WHOLE),  # UltraFeedback
        ({**WITH_SYSTEM, "prompt": "What is it?", "messages": WITH_SYSTEM["chosen"]}, WITH_SYSTEM),
        ({**WHOLE, "prompt": [ASKED]}, WHOLE),
        ({**LONG, "prompt": "What is it?"}, LONG),
        ({**LONG, "prompt": [ASKED]}, LONG),
        ({**WITH_SYSTEM, "prompt": [SYSTEM, ASKED]}, WITH_SYSTEM),
        ({**WHOLE, "system": "Be brief."}, WITH_SYSTEM),
        ({**CHATS, "prompt": "What is it?"}, CHATS),
        ({**CHATS, "chosen": "A fox.", "rejected": "No"}, CHATS),
        ({**CHATS, "chosen": GOOD, "rejected": BAD}, CHATS),
        ({"conversations": [SHAREGPT], **GPT}, CHATS),  # LLaMA-Factory
        ({"conversations": [SHAREGPT], **ANSWERS, "chosen": "A fox.", "rejected": "No"}, CHATS),
        ({**TEXTS, "question": "What is it?", "score_chosen": 9.0}, TEXTS),
        ({**TEXTS, "weight": 1, "label": "a"}, TEXTS),
    ],
)
def test_layouts_are_read_as_trl_reads_the_plain_one(row, as_trl_has_it, objective, tmp_path):
    rows = rows_of(load(tmp_path, [row] * 2, objective, max_length=None))
    expected = by_trl([as_trl_has_it] * 2)
    each = 2 if objective == "kto" else 1  # rows, and those with another's answer
    order = [0, 2, 1, 3] if objective == "kto" else range(4)
    for number, place in enumerate(order):
        span = slice(*rows.offsets[each * number : each * number + 2])
        prompt, answer = expected[place]
        assert rows.ids[span].tolist() == prompt + answer
        if objective != "reward":
            assert rows.trained[span].sum() == len(answer)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("more", "field"),
    [
        *(({name: "Who runs there?"}, name) for name in ("question", "instruction", "Context")),
        *(({name: "Who runs there?"}, name) for name in ("input", "user_query", "history")),
        ({"system": "Be brief."}, "system"),
        ({"system_prompt": "Be brief."}, "system_prompt"),
        ({"tools": [{"name": "weather"}]}, "tools"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": [turn("user", "Who?"), turn("assistant", "I")]}, "messages"),
        ({"weight": 0}, "weight"),
        ({"sample_weight": 0.5}, "sample_weight"),
        ({"chosen_weight": 0.0}, "chosen_weight"),
        ({"documents": ["A fox is red."]}, "documents"),
        ({"weights": [1, 0]}, "weights"),
        ({"input_ids": [1, 2]}, "input_ids"),
        ({"prompt_ids": [1, 2]}, "prompt_ids"),
        ({"labels": [-100, 2]}, "labels"),
        ({"attention_mask": [1, 1]}, "attention_mask"),
        ({"completion_mask": [0, 1]}, "completion_mask"),
        ({"assistant_masks": [0, 1]}, "assistant_masks"),
        ({"ref_chosen_logps": -3.5}, "ref_chosen_logps"),
        ({"images": ["a.png"]}, "images"),
    ],
)
def test_a_field_that_would_be_lost_is_refused(more, field, objective, tmp_path):
    row = {"prompt": "What is it?", **OBJECTIVES[objective]}
    with pytest.raises(DataError, match=rf"train.jsonl:2:? .*field {field}\b"):
        load(tmp_path, [row, {**row, **more}], objective)


OTHER = {**WHOLE, "prompt": "Who is it?"}


@pytest.mark.parametrize(
    ("row", "objective", "problem"),
    [
        ({**ANSWERS, "question": "What is it?"}, "dpo", "the fields question are not learned"),
        ({**ANSWERS, "frage": "Was ist das?"}, "dpo", "no prompt: .* the fields frage are not"),
        ({**ANSWERS, "frage": "Was ist das?"}, "kto", "no prompt: .* the fields frage are not"),
        ({**ANSWERS, "question": "What is it?"}, "reward", "field question would not be learned"),
        ({**CHATS, "prompt": []}, "dpo", "no prompt: chosen and rejected begin differently"),
        ({"chosen": [SYSTEM, ASKED, GOOD], "rejected": [ASKED, BAD]}, "dpo", "there is no prompt"),
        (OTHER, "dpo", "chosen is no answer to the prompt, with messages of user"),
        (OTHER, "kto", "no answer to the prompt"),
        ({**WHOLE, "rejected": [ASKED, BAD, ASKED]}, "dpo", "rejected is no answer"),
        ({**CHATS, "prompt": [ASKED], "chosen": [SYSTEM, GOOD]}, "dpo", "chosen is no answer"),
        ({**CHATS, "messages": [ASKED, GOOD], "prompt": None}, "dpo", "messages are not learned"),
        ({**CHATS, "chosen": [{**GOOD, "weight": 0}]}, "dpo", "message of weight 0"),
        ({**CHATS, "chosen": [{**GOOD, "weight": 0}]}, "reward", "message of weight 0"),
        ({**RATED, "completion": [{**GOOD, "weight": 0}]}, "kto", "message of weight 0"),
        ({"messages": [{**GOOD, "weight": 0}], "label": 1}, "classification", "of weight 0"),
        ({"text": "a", "label": 1, "question": "What?"}, "classification", "field question"),
        ({"text": "a", "label": 1, "hypothesis": "b"}, "classification", "field hypothesis"),
        ({**TEXTS, "chosen": ["A fox.", "fox"]}, "dpo", "chosen.0. must be an object, found a te"),
        ({**TEXTS, "chosen": json.dumps([GOOD])}, "dpo", "chosen is messages written as one text"),
        ({**RATED, "prompt": str([ASKED])}, "kto", "prompt is messages written as one text"),
        ({**SFT, "prompt": json.dumps([SHAREGPT])}, "sft", "prompt is messages written as one"),
        ({**TEXTS, "rejected": 5}, "dpo", "rejected must be a string, found a number"),
        ({**CHATS, "rejected": 5}, "dpo", "rejected must be a list of messages, found a number"),
        ({**TEXTS, "completion": "A fox.", "label": True}, "kto", "a pair .* and a completion"),
        ({"question": "a", "completion": "b", "label": True}, "kto", "no field prompt among .*que"),
        ({f"key {k}": k for k in range(5000)}, "dpo", "key 11 and 4,988 more\n"),
        ({f"key {k}": k for k in range(5000)}, "sft", "key 11 and 4,988 more\n"),
        ({"text": {str(k): "a" for k in range(5000)}}, "sft", "found an object .*\n.*records"),
    ],
)
def test_a_row_that_cannot_be_learned_is_refused(row, objective, problem, tmp_path):
    with pytest.raises(DataError, match=rf"train.jsonl:1: .*{problem}") as caught:
        load(tmp_path, [row] * 2, objective)
    assert caught.value.hint is not None
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"chosen": "yes ", "rejected": "no"}, ["yes ", "no"]),
        ({"chosen": "good", "rejected": "great"}, ["good", "great"]),
        ({"chosen": " good", "rejected": " great"}, [" good", " great"]),
    ],
)
def test_letters_that_two_answers_begin_with_are_no_prompt(row, answers, tmp_path):
    data = load(tmp_path, [row, TEXTS])
    assert [pieces(data, k) for k in (0, 1)] == [("", f"{answer}</s>") for answer in answers]
    assert any("warning: there is no prompt" in line for line in data.report)


def test_rows_of_texts_and_of_messages_are_not_mixed(tmp_path):
    for first, other in ((TEXTS, CHATS), (CHATS, TEXTS)):
        for objective in ("dpo", "kto", "reward"):
            with pytest.raises(DataError, match=r"jsonl:[23]: .* is .*, unlike before"):
                load(tmp_path, [first, first, other], objective)


SAME = {**TEXTS, "rejected": TEXTS["chosen"]}
LATE = {**TEXTS, "rejected": TEXTS["chosen"] + " Really"}
EMPTY = {**TEXTS, "rejected": " "}
CALL = [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize(
    ("rows", "objective", "data", "said"),
    [
        ([TEXTS, SAME, SAME], "dpo", {}, "the same tokens (first {}:2, 2 in all)"),
        ([TEXTS, LATE, SAME], "dpo", {"max_length": 8}, "the same tokens (first {}:2, 2 in all)"),
        ([TEXTS, LATE], "dpo", {}, None),
        ([CHATS, {**CHATS, "rejected": [GOOD]}], "orpo", {}, "same tokens (first {}:2, 1 in all)"),
        ([TEXTS, SAME], "reward", {}, "the same tokens (first {}:2, 1 in all)"),
        ([TEXTS, SAME], "kto", {}, "rated desirable and undesirable (first {}:2, 2 in all)"),
        ([RATED, {**RATED, "label": False}, {**RATED, "prompt": "Who?"}], "kto", {},
         "rated desirable and undesirable (first {}:2, 2 in all)"),
        ([TEXTS, EMPTY], "dpo", {}, "an answer is empty, which teaches only to end (first {}:2, 1"),
        ([CHATS, {**CHATS, "chosen": [turn("assistant", "")]}], "dpo", {}, "empty, which"),
        ([RATED, {**RATED, "completion": ""}], "kto", {}, "an answer is empty"),
        ([SFT, {**SFT, "completion": ""}], "sft", {}, "an answer is empty"),
        ([TEXTS, {**TEXTS, "chosen": "What is it? A fox.", "rejected": "What is it? No"}], "dpo",
         {}, "warning: the answers begin with the prompt, which is read twice (first {}:2, 1 in"),
    ],
)  # fmt: skip
def test_pairs_that_teach_nothing_are_counted_and_alone_refused(
    rows, objective, data, said, tmp_path
):
    report = "\n".join(load(tmp_path, rows, objective, **data).report)
    warnings = [
        line for line in report.split("\n") if "warning: " in line and "desirable," not in line
    ]
    if said is None:
        assert not warnings
        return
    assert said.format(tmp_path / "train.jsonl") in report
    alone = rows[:2] if RATED in rows[:1] and "rated" in said else rows[1:2] * 2
    if "twice" not in said:
        with pytest.raises(DataError, match=r"data.train: no example teaches anything: .*first"):
            load(tmp_path, alone, objective, **data)


@pytest.mark.parametrize("objective", ["dpo", "reward", "kto", "classification"])
def test_what_the_template_leaves_out_is_said(objective, tmp_path):
    row = {"messages": [ASKED], "label": 1} if objective == "classification" else CHATS
    report = load(tmp_path, [{**row, "tools": [{"name": "f"}]}] * 2, objective).report
    assert any("the chat template leaves out tools (first" in line for line in report)


def test_an_answer_that_only_calls_a_tool_is_not_empty(tmp_path):
    calls = [turn("assistant", "", tool_calls=[{"type": "function", "function": CALL[0]}])]
    with pytest.raises(DataError, match="template"):  # it has no place for calls
        load(tmp_path, [{**SFT, "prompt": [ASKED], "completion": calls}], "sft")
