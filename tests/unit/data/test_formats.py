"""Token ids and labels against a real SFTTrainer on the same rows."""

from __future__ import annotations

import json
import re

import datasets
import pytest
import torch
from trl import SFTConfig, SFTTrainer

from hetero_framework.config import DataConfig
from hetero_framework.data.chat import ChatRenderer
from hetero_framework.data.conversations import Conversation
from hetero_framework.data.formats import (
    ALPACA_WITH_INPUT,
    ALPACA_WITHOUT_INPUT,
    Formatter,
    detect_format,
)
from hetero_framework.data.sources import Record
from hetero_framework.data.splits import renamed
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import DataError
from tests.unit.data_helpers import (
    CHATML,
    CHATML_MARKED,
    QUIET,
    chat,
    make_config,
    tiny_llama,
    tiny_tokenizer,
    trl_template,
    write_jsonl,
)

# TRL's own defaults use names that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


TEXT = [{"text": text} for text in ("The fox", "two and two is four" * 4, "ends</s>", "ü 漢 \n")]
PAIRS = [
    {"prompt": "What is two and two?", "completion": " It is four."},
    {"prompt": "a long prompt " * 6, "completion": "never seen"},  # left out when cut to 24
    {"prompt": "the qui", "completion": "ck fox"},  # one token reaches over the border
    {"prompt": "", "completion": "no prompt</s>"},
]
CONVERSATIONS = [
    {"messages": chat("What is it?", "The fox.", "And two?", "It is four.")},
    {"messages": chat("Hello", "The lazy dog " * 8, system="Be brief.")},
    {"messages": chat("One", "Two")},
]
CHAT_PAIRS = [
    {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CONVERSATIONS
]
ALPACA = [
    {"instruction": "Describe the fox.", "input": "", "output": "Quick and brown."},
    {"instruction": "Add.", "input": "two {and} two", "output": "four"},
    {"instruction": "No input", "input": None, "output": "fine"},
]


def formatter_of(name: str, tokenizer, **settings) -> Formatter:
    return Formatter(name, tokenizer, DataConfig(train="unread", **settings))


def alpaca_as_pairs() -> list[dict]:
    prompts = [
        ALPACA_WITH_INPUT.format(**row) if row["input"] else ALPACA_WITHOUT_INPUT.format(**row)
        for row in ALPACA
    ]
    return [
        {"prompt": prompt, "completion": row["output"]}
        for prompt, row in zip(prompts, ALPACA, strict=True)
    ]


def sft_trainer(rows, tokenizer, tmp_path, **settings) -> SFTTrainer:
    return SFTTrainer(
        tiny_llama(len(tokenizer)),
        SFTConfig(str(tmp_path / "trl"), bf16=False, **QUIET, **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def ours(rows, tokenizer, tmp_path, **data):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return load_data(make_config(tmp_path, {"train": "rows.jsonl", **data}), tokenizer)


@pytest.mark.parametrize(
    ("rows", "template", "settings", "sft_settings"),
    [
        (TEXT, None, {}, {}),
        (TEXT, None, {"max_length": 5}, {"max_length": 5}),
        ([{"body": "The fox", "other": 1}], None, {"dataset_text_field": "body"},
         {"dataset_text_field": "body"}),
        (PAIRS, None, {}, {}),
        (PAIRS, None, {"max_length": 24}, {"max_length": 24}),
        (PAIRS, None, {"completion_only_loss": False, "max_length": 24},
         {"completion_only_loss": False, "max_length": 24}),
        (ALPACA, None, {}, {}),
        (CONVERSATIONS, CHATML, {"assistant_only_loss": False}, {}),
        (CONVERSATIONS, CHATML_MARKED, {}, {"assistant_only_loss": True}),
        (CONVERSATIONS, CHATML_MARKED, {"max_length": 30},
         {"assistant_only_loss": True, "max_length": 30}),
        (CHAT_PAIRS, CHATML, {}, {}),
        (CHAT_PAIRS, CHATML_MARKED, {"assistant_only_loss": True}, {"assistant_only_loss": True}),
        (CHAT_PAIRS, CHATML, {"completion_only_loss": False}, {"completion_only_loss": False}),
    ],
)  # fmt: skip
def test_token_ids_and_labels_equal_sft_trainer(tmp_path, rows, template, settings, sft_settings):
    given = alpaca_as_pairs() if rows is ALPACA else rows
    trainer = sft_trainer(given, tiny_tokenizer(template), tmp_path, **sft_settings)
    assert_same_rows(ours(rows, tiny_tokenizer(template), tmp_path, **settings), trainer)


def assert_same_rows(data: TrainData, trainer: SFTTrainer) -> None:
    examples = [data.examples[index] for index in range(len(data.examples))]
    assert [ids.tolist() for ids, _ in examples] == list(trainer.train_dataset["input_ids"])
    assert [labels.tolist() for _, labels in examples] == list(trainer.train_dataset["labels"])


FOUR = {"input_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([FOUR, {"input_ids": [9, 5, 4]}], {}),
        ([{**FOUR, "labels": [-100, -100, 7, 8]}], {}),
        ([{**FOUR, "completion_mask": [0, 0, 1, 1]}], {"completion_only_loss": True}),
        ([{**FOUR, "completion_mask": [0, 1, 1, 1]}],
         {"completion_only_loss": True, "max_length": 3}),
        ([{**FOUR, "completion_mask": [0, 0, 1, 1]}], {"completion_only_loss": False}),
        ([{**FOUR, "assistant_masks": [0, 1, 0, 1]}], {}),
    ],
)  # fmt: skip
def test_tokens_that_are_given_equal_a_batch_of_sft_trainer(tmp_path, rows, settings):
    trainer = sft_trainer(rows, tiny_tokenizer(), tmp_path, **settings)
    data = ours(rows, tiny_tokenizer(), tmp_path, **settings)
    theirs = trainer.data_collator([trainer.train_dataset[k] for k in range(len(rows))])
    for k in range(len(rows)):
        ids, labels = data.examples[k]
        assert ids.tolist() == theirs["input_ids"][k, : len(ids)].tolist()
        assert labels.tolist() == theirs["labels"][k, : len(ids)].tolist()


def test_a_completion_mask_that_is_given_counts_by_itself(tmp_path):
    """In TRL it does only where completion_only_loss is set."""
    rows = [{**FOUR, "completion_mask": [0, 0, 1, 1]}]
    assert ours(rows, tiny_tokenizer(), tmp_path).examples[0][1].tolist() == [-100, -100, 7, 8]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "labels": [5]}, "labels has 1 numbers, input_ids 2"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "neither -100 nor the token at its place"),
        ({"input_ids": [5, -1]}, "hold padding, or numbers below 0"),
        ({"input_ids": [5, 0], "attention_mask": [1, 0]}, "hold padding"),
        ({"input_ids": [5, 10**6]}, "the model has only"),
        ({"input_ids": "5 6"}, "input_ids must be a list of whole numbers"),
        ({"input_ids": None, "labels": [5, 6]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "the field loss_mask of an example"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path, row, message):
    write_jsonl(tmp_path / "rows.jsonl", [row])
    config = make_config(tmp_path, {"train": "rows.jsonl"})
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{message}"):
        load_data(config, tiny_tokenizer(), vocab_size=100)


@pytest.mark.filterwarnings("ignore:.*keep_end.*:FutureWarning")
def test_truncation_keep_end_equals_sft_trainer(tmp_path):
    settings = {"max_length": 9, "truncation_mode": "keep_end"}
    trainer = sft_trainer(PAIRS, tiny_tokenizer(), tmp_path, **settings)
    assert_same_rows(ours(PAIRS, tiny_tokenizer(), tmp_path, **settings), trainer)


@pytest.mark.parametrize(
    "name", ["llama3", "qwen2_5", "qwen3", "qwen3_6", "nemotron_3_super", "deepseek_r1_distill"]
)
@pytest.mark.parametrize("as_pairs", [False, True])
def test_assistant_tokens_without_generation_marks_equal_sft_trainer(tmp_path, name, as_pairs):
    rows, template = CHAT_PAIRS if as_pairs else CONVERSATIONS, trl_template(name)
    theirs, data = (
        make(rows, tiny_tokenizer(template), tmp_path, assistant_only_loss=True)
        for make in (sft_trainer, ours)
    )
    assert_same_rows(data, theirs)


def test_assistant_tokens_derived_equal_those_of_the_marked_template():
    for row in CONVERSATIONS:
        said = Conversation(row["messages"], "here")
        derived, marked = (
            ChatRenderer(tiny_tokenizer(template)).ids_and_mask(said)
            for template in (CHATML, CHATML_MARKED)
        )
        assert derived == marked
        assert any(derived[1])


def test_batches_of_a_training_equal_sft_trainer(tmp_path):
    rows = [{"text": "The fox " * (index % 5 + 1)} for index in range(7)]
    seen = []

    class Recording(SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append({key: inputs[key].clone() for key in inputs})
            return torch.zeros(())

    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    settings |= {"num_train_epochs": 2, "seed": 3}
    trainer = sft_trainer(rows, tiny_tokenizer(), tmp_path, **settings)
    trainer.__class__ = Recording
    trainer.train()
    write_jsonl(tmp_path / "rows.jsonl", rows)
    data = load_data(make_config(tmp_path, {"train": "rows.jsonl"}, **settings), tiny_tokenizer())
    batches = [batch for step in range(data.total_steps) for batch in data.step_batches(step)]
    assert len(batches) == len(seen) == 8
    for mine, theirs in zip(batches, seen, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict.fromkeys(["text"]), "text"),
        (dict.fromkeys(["prompt", "completion", "text"]), "prompt_completion"),
        (dict.fromkeys(["messages", "id"]), "messages"),
        (dict.fromkeys(["conversations"]), "messages"),
        (dict.fromkeys(["instruction", "input", "output", "text"]), "alpaca"),
        (dict.fromkeys(["instruction", "output"]), "alpaca"),
        ({"prompt": None, "completion": None, "messages": [], "text": None}, "messages"),
    ],
)
def test_detect_format_by_fields_that_are_not_null(fields, name):
    assert detect_format(fields, "here", "text") == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["question", "answer"], "from the fields question, answer"),
        (["prompt", "chosen", "rejected"], "prompt, chosen, rejected are those of preference data"),
        (["chosen", "rejected"], "those of preference data, not of supervised"),
        (["instruction", "input", "chosen", "rejected"], "those of preference data"),
        (["prompt", "completions", "labels"], "those of data of stepwise supervision"),
    ],
)
def test_detect_format_names_unknown_fields_and_data_of_other_methods(fields, message):
    with pytest.raises(DataError, match=f"^here: .*{message}"):
        detect_format(dict.fromkeys(fields, "a"), "here", "text")


GOOD = chat("Hello", "Hi")
ASKED = {"role": "user", "content": None}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("text", {"txt": "a", "id": 3}, "f:9: no field text; its fields are txt, id"),
        ("text", {"text": None}, "f:9: the field text must be a string, found null"),
        ("text", {"text": 7}, "found a number"),
        ("text", {"text": ["a"]}, "found a list"),
        ("text", {"text": "a\ud800"}, "half of a surrogate pair at character 2"),
        ("prompt_completion", {"prompt": "a"}, "no field completion; its fields are prompt"),
        ("prompt_completion", {"prompt": "a", "completion": GOOD}, "completion is no answer to"),
        ("prompt_completion", {"prompt": GOOD[:1], "completion": GOOD[:1]}, "completion is no ans"),
        ("prompt_completion", {"prompt": 7, "completion": "a"}, "prompt must be a string"),
        ("alpaca", {"instruction": "a"}, "no field output"),
        ("alpaca", {"instruction": "a", "input": 3, "output": "b"}, "input must be a string"),
        ("messages", {"messages": []}, "messages must be a list of messages, found an empty list"),
        ("messages", {"messages": "hello"}, "found a text"),
        ("messages", {"messages": ["hello"]}, r"messages\[0\] must be an object, found a text"),
        ("messages", {"messages": [{"content": "a"}]}, r"messages\[0\] has no role; .* content"),
        ("messages", {"messages": [*GOOD, {"role": "user"}]}, r"messages\[2\] has no content"),
        ("messages", {"messages": [{**ASKED, "tool_calls": None}]}, "has no content"),
        ("messages", {"messages": [{**ASKED, "content": 3}]}, "found a number"),
        ("messages", {"messages": chat("a", "b\udc00")}, r"messages\[1\] holds half of a surr"),
        ("messages", {"messages": chat("only a question")}, "no assistant message"),
    ],
)
def test_formatter_names_place_and_fault_of_a_bad_example(name, fields, message):
    formatter = formatter_of(name, tiny_tokenizer(CHATML))
    with pytest.raises(DataError, match=message):
        formatter([Record("f:9", fields)])


@pytest.mark.parametrize(
    ("name", "option", "rows"),
    [
        ("text", "completion_only_loss", TEXT),
        ("messages", "completion_only_loss", CONVERSATIONS),
        ("text", "assistant_only_loss", TEXT),
        ("alpaca", "assistant_only_loss", ALPACA),
        ("prompt_completion", "assistant_only_loss", PAIRS),
    ],
)
def test_formatter_option_that_cannot_apply_is_an_error(name, option, rows):
    with pytest.raises(DataError, match=f"data.{option} is true"):
        formatter_of(name, tiny_tokenizer(), **{option: True})([Record("f:1", rows[0])])


@pytest.mark.parametrize(
    ("name", "tokenizer", "fields", "said", "advice"),
    [
        ("messages", {}, CONVERSATIONS[0], "no chat template", "data.chat_template_path"),
        ("text", {"eos_token": None}, TEXT[0], "no end-of-sequence token", "data.add_eos"),
        ("messages", {"template": "{{ raise_exception('roles must alternate') }}"},
         CONVERSATIONS[0], "f:1: .* roles must alternate", "user, assistant, user, assistant"),
        ("messages", {"template": CHATML + "{% generation %}{% endgeneration %}"},
         CONVERSATIONS[0], "marks no token of the assistant", ""),
    ],
)  # fmt: skip
def test_formatter_without_what_it_needs_gives_advice(name, tokenizer, fields, said, advice):
    with pytest.raises(DataError, match=said) as caught:
        formatter_of(name, tiny_tokenizer(**tokenizer))([Record("f:1", fields)])
    assert advice in str(caught.value)


def test_formatter_without_eos_token_needs_none_that_it_does_not_add():
    tokenizer = tiny_tokenizer(eos_token=None)
    [(ids, _)] = formatter_of("text", tokenizer, add_eos=False)([Record("f:1", TEXT[0])])
    assert tokenizer.decode(ids) == "The fox"


def test_chat_template_kwargs_and_tools_reach_the_template():
    template = (
        "{{ style }}|{{ tools[0]['name'] }}|{% for m in messages %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(template)
    formatter = formatter_of("messages", tokenizer, chat_template_kwargs={"style": "a"})
    row = {"messages": GOOD, "tools": '[{"name": "add"}]'}
    [(ids, _), (other, _)] = formatter(
        [Record("f:1", row), Record("f:2", {**row, "chat_template_kwargs": {"style": "b"}})]
    )
    assert tokenizer.decode(ids) == "a|add|HelloHi"
    assert tokenizer.decode(other) == "b|add|HelloHi"


PARTS = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_template_of_a_processor_gets_text_as_parts():
    tokenizer = tiny_tokenizer(PARTS)
    plain = chat("What?", "A fox.")
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in plain]
    expected = tokenizer.apply_chat_template(parts, chat_template=PARTS, tokenize=False)
    assert "What?" in expected
    assert "What?" not in tokenizer.apply_chat_template(plain, chat_template=PARTS, tokenize=False)
    renderer = ChatRenderer(tokenizer)
    for messages in (plain, parts):
        ids, mask = renderer.ids_and_mask(Conversation(messages, "row 1"))
        assert tokenizer.decode(ids) == expected
        answer = [token for token, bit in zip(ids, mask, strict=True) if bit]
        assert tokenizer.decode(answer) == "A fox."


FOLLOWED = [
    {"question": "2 and 2?", "answer": "4"},
    {"query": "2 and 2?", "response": "4"},
    {"input": "2 and 2?", "output": "4"},
    {"prompt": "2 and 2?", "response": "4"},
    {"question": "2 and 2?", "completion": "4"},
    {"instruction": "Add.", "response": "4"},
    {"instruction": "Add.", "context": "2 and 2", "response": "4"},
    {"question": "Sum?", "context": "2 and 2", "answer": "4"},
    {"Question": "2 and 2?", "Answer": "4"},
    {"dialog": chat("2?", "2")},
    {"Messages": chat("2?", "2")},
    {"Text": "two and two"},
    {"content": "two and two"},
    {"article_body": "two and two"},
]


@pytest.mark.parametrize("fields", FOLLOWED, ids=lambda fields: " ".join(fields))
def test_a_hint_on_columns_works_as_it_is_written(fields):
    with pytest.raises(DataError) as refusal:
        detect_format(fields, "here", "text")
    columns = json.loads(re.search(r"data\.columns (\{.*\})", str(refusal.value))[1])
    record = renamed(Record("here", fields), columns)
    name = detect_format(record.fields, "here", "text")
    formatter = Formatter(name, tiny_tokenizer(CHATML), DataConfig(train="t"))
    [(_, trained)] = formatter([record])
    assert any(trained[1:])
    assert not formatter.unused


TOUCHING = [
    ("What is it?", "A fox.", True),
    ("What is it? ", "A fox.", False),
    ("What is it?", " A fox.", False),
    ("What is it?\n", "A fox.", False),
    ("Wörter", "Anfang", True),
    ("何ですか？", "きつねです。", False),
    ("นี่คืออะไร", "สุนัข", False),
    ("What is it?</s>", "A fox.", False),
]


@pytest.mark.parametrize(("prompt", "completion", "touch"), TOUCHING)
def test_answers_that_touch_their_prompts_are_counted(prompt, completion, touch):
    formatter = Formatter("prompt_completion", tiny_tokenizer(), DataConfig(train="t"))
    formatter([Record(f"row {k}", {"prompt": prompt, "completion": completion}) for k in (1, 2)])
    told = [note for note in formatter.notes if "touch" in note]
    assert bool(told) == touch
    assert all("first row 1, 2 in all" in note for note in told)
