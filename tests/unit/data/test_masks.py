"""The tokens of conversations in the loss, against the training templates of TRL."""

from __future__ import annotations

from importlib.resources import files
from itertools import groupby
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from hetero_framework.data.chat import ChatRenderer, find_turns, mark_turns, numbered
from hetero_framework.data.conversations import Conversation, Remarks
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import DataError
from tests.unit.data_helpers import (
    CHATML,
    CHATML_MARKED,
    chat,
    make_config,
    tiny_tokenizer,
    trl_template,
    write_jsonl,
)

TEMPLATES = files("trl") / "chat_templates"
FAMILIES = sorted(
    file.name.removesuffix("_training.jinja")
    for file in TEMPLATES.iterdir()
    if file.name.endswith("_training.jinja")
)
WITHOUT_CALLS = {  # families whose training templates write no call of a tool either
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3",
    "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


CALL = {"type": "function", "id": "c1", "function": {"name": "find", "arguments": {"x": "Paris"}}}
FOUND = {"role": "tool", "name": "find", "tool_call_id": "c1", "content": "sunny"}
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "string", "description": "Where."}},
    "required": ["x"],
}
TOOL = {"name": "find", "description": "Find it.", "parameters": PARAMETERS}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
MULTI = chat("a", "b", "c", "d")
CASES = {
    "single": (chat("two?", "It is four."), {}),
    "multi": (MULTI, {}),
    "system": (chat("a", "b", "c", "d", system="Be brief."), {}),
    "assistant first": ([assistant("hello"), *MULTI], {}),
    "assistant twice": ([user("a"), assistant("b"), assistant("c"), *MULTI], {}),
    "user last": ([*MULTI, user("e")], {}),
    "other letters": (chat("ü", "漢字 🦊.", "é", "\n \n🦊."), {}),
    "white space": (chat("a", "\n b \n", "c", " d\n\n\ne "), {}),
    "no thinking": (MULTI, {"enable_thinking": False}),
    "thinking": (
        [user("a"), assistant("b", reasoning_content="one"), user("c"),
         assistant("d", reasoning_content="two")],
        {},
    ),
    "thinking in the content": (
        chat("a", "<think>\none\n</think>\n\nb", "c", "<think>\ntwo\n</think>\n\nd"), {}
    ),
    "call": (
        [user("?"), assistant("", tool_calls=[CALL]), FOUND, assistant("It is."), *MULTI], TOOLS
    ),
    "call with text and thinking": (
        [user("?"), assistant("Wait", tool_calls=[CALL], reasoning_content="one"), FOUND,
         assistant("It is.", reasoning_content="two")],
        TOOLS,
    ),
}  # fmt: skip


def of_trl(name: str, tokenizer: PreTrainedTokenizerFast, messages, arguments):
    """What SFTTrainer makes with `assistant_only_loss`, or the error."""
    template = trl_template(f"{name}_training")
    if ChatRenderer(tokenizer)._takes_parts:
        messages = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]
    try:
        how = {"return_dict": True, "return_assistant_tokens_mask": True, **arguments}
        encoding = tokenizer.apply_chat_template(messages, chat_template=template, **how)
    except Exception as error:  # whatever a template raises
        return error
    return encoding["input_ids"], [bool(bit) for bit in encoding["assistant_masks"]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_mask_equal_those_of_the_training_templates_of_trl(name, case):
    messages, arguments = CASES[case]
    tokenizer = tiny_tokenizer(trl_template(name))
    expected = of_trl(name, tokenizer, messages, arguments)
    renderer = ChatRenderer(tokenizer)
    if isinstance(expected, Exception):
        with pytest.raises(DataError, match="f:1: the chat template refused"):
            renderer.ids_and_mask(Conversation(messages, "f:1", arguments))
    elif "call" in case and name in WITHOUT_CALLS:
        ids, mask = expected
        said = [token for token, bit in zip(ids, mask, strict=True) if bit]
        assert "find" not in tokenizer.decode(said)
        with pytest.raises(DataError, match=r"f:1: .* leaves out the tool calls of message 2"):
            renderer.ids_and_mask(Conversation(messages, "f:1", arguments))
    else:
        assert renderer.ids_and_mask(Conversation(messages, "f:1", arguments)) == expected
        assert any(expected[1])


def said(tokenizer, ids, mask) -> list[str]:
    """The texts that the loss covers."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for bit, run in runs if bit]


def texts_of(template: str, messages, arguments=None, **settings) -> list[str]:
    tokenizer = tiny_tokenizer(template)
    renderer = ChatRenderer(tokenizer, **settings)
    return said(tokenizer, *renderer.ids_and_mask(Conversation(messages, "f:1", arguments or {})))


FIRST = [assistant("hello"), user("a"), assistant("b")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The system prompt, the beginning-of-sequence token and the header are not the assistant's.
        (trl_template("qwen2_5_vl"), ["hello<|im_end|>\n", "b<|im_end|>\n"]),
        (trl_template("llama3_1"), ["hello<|eot_id|>", "b<|eot_id|>"]),
        (trl_template("llama3"), ["hello<|eot_id|>", "b<|eot_id|>"]),
        (trl_template("gemma4"), ["hello<turn|>\n", "b<turn|>\n"]),
        # Without a generation prompt.
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
         ["hello<|im_end|>\n", "b<|im_end|>\n"]),
        # The generation prompt in the loop, behind the last message.
        (
            "{% for m in messages %}\n<|{{ m.role }}|>\n{{ m.content + eos_token }}\n"
            "{% if loop.last and add_generation_prompt %}\n<|assistant|>\n{% endif %}\n"
            "{% endfor %}",
            ["hello</s>\n", "b</s>\n"],
        ),
        # By number instead of in a loop over messages, and with more than one name in a loop.
        (
            "{% for k, v in {'x': 1}.items() %}{{ k }}{% endfor %}"
            "{%- for i in range(messages | length) %}\n  {%- set m = messages[i] -%}\n"
            "{{ '<' ~ m.role ~ '>' ~ m.content ~ ';' }}{% endfor %}",
            ["hello;", "b;"],
        ),
        # Loops in comments and loops that write nothing but white space.
        (
            "{# {% for m in messages %} #}{% for m in messages %} \n{% endfor %}"
            "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}",
            ["hello|", "b|"],
        ),
        # What a template marks itself.
        (CHATML_MARKED, ["hello<|im_end|>\n", "b<|im_end|>\n"]),
    ],
    ids=["qwen2_5_vl", "llama3_1", "llama3", "gemma4", "no prompt", "prompt in the loop",
         "by number", "other loops", "its own marks"],
)  # fmt: skip
def test_a_first_message_of_the_assistant_trains_its_text_alone_in_any_template(template, expected):
    assert texts_of(template, FIRST) == expected


@pytest.mark.parametrize("name", sorted(f.name for f in TEMPLATES.iterdir() if "jinja" in f.name))
def test_marks_leave_the_text_of_a_template_as_it_is(name):
    tokenizer = tiny_tokenizer((TEMPLATES / name).read_text(encoding="utf-8"))
    renderer = ChatRenderer(tokenizer)
    chat = Conversation(MULTI, "f:1")
    text = renderer._apply(chat)
    turns = renderer._turns(chat, text)
    written = ["".join(text[part.start : part.stop] for part in turn) for turn in turns]
    for turn, message in zip(written, MULTI, strict=True):
        assert message["content"] in turn
    assert sum(map(len, written)) <= len(text)


def test_marks_within_marks_belong_to_the_inner_message():
    template = (
        "{% for m in messages %}({{ m.content }}{% for n in messages if n.of == m.content %}"
        "[{{ n.content }}]{% endfor %}){% endfor %}"
    )
    messages = [{"role": "x", "content": "a"}, {"role": "x", "content": "b", "of": "a"}]
    [marked], _ = render_jinja_template([numbered(messages)], chat_template=mark_turns(template))
    text, turns = find_turns(marked, 2)
    assert text == "(a[b])(b)"
    assert [[text[p.start : p.stop] for p in turn] for turn in turns] == [
        ["(a", ")"],
        ["[b]", "(b)"],
    ]


WEIGHTS = [user("two"), assistant("three", weight=0), user("sure?"), assistant("four", weight=1)]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_a_message_of_weight_0_is_not_trained(template):
    assert texts_of(template, WEIGHTS) == ["four<|im_end|>\n"]
    plain = tiny_tokenizer(template).apply_chat_template(
        chat("two", "three", "sure?", "four"), tokenize=False
    )
    covered = texts_of(template, WEIGHTS, assistant_only=False)
    assert covered == plain.split("three<|im_end|>\n")


def loaded(folder: Path, messages: list, template: str) -> TrainData:
    """Two conversations, these messages and others."""
    write_jsonl(folder / "rows.jsonl", [{"messages": messages}, {"messages": MULTI}])
    return load_data(make_config(folder, {"train": "rows.jsonl"}), tiny_tokenizer(template))


def test_an_example_with_all_weights_0_is_left_out(tmp_path):
    data = loaded(tmp_path, [user("a"), assistant("b", weight=0)], CHATML)
    assert len(data.examples) == 1
    assert any("1 of 2 examples have no token to learn from" in line for line in data.report)


@pytest.mark.parametrize(
    ("name", "messages", "arguments", "count"),
    [
        ("nemotron_3_nano", CASES["thinking"][0], {}, {"thinking": 1}),
        ("nemotron_3_nano", CASES["thinking"][0][:2], {}, {}),
        ("qwen3", CASES["thinking"][0], {}, {}),  # as in TRL every turn keeps it
        ("deepseekv3", CASES["thinking in the content"][0], {}, {"thinking": 1}),
        ("gemma3", MULTI, TOOLS, {"tools": 1}),
        ("muse_glimmer", CASES["call with text and thinking"][0], TOOLS,
         {"text beside tool calls": 1}),
    ],
)  # fmt: skip
def test_content_left_out_by_the_template_is_counted(name, messages, arguments, count):
    notes = Remarks()
    renderer = ChatRenderer(tiny_tokenizer(trl_template(name)), notes=notes)
    renderer.ids_and_mask(Conversation(messages, "f:1", arguments))
    about = [note for note in notes if "field" not in note]
    assert about == [
        f"warning: the chat template leaves out {what} (first f:1, {number} in all)"
        for what, number in count.items()
    ]


def test_the_report_names_content_left_out_by_the_template(tmp_path):
    data = loaded(tmp_path, CASES["thinking"][0], trl_template("nemotron_3_nano"))
    said = f"train: warning: the chat template leaves out thinking (first {tmp_path}"
    assert any(line.startswith(said) for line in data.report)


@pytest.mark.parametrize("assistant_only", [True, False])
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, None])
def test_a_message_that_the_template_does_not_write_is_refused(template, assistant_only):
    if template is None:
        template = trl_template("qwen2_5")
        messages = [user("a"), {"role": "function_call", "content": "b"}, assistant("b")]
    else:
        drops = "{% set messages = messages | rejectattr('role', 'equalto', 'other') | list %}"
        template = drops + template
        messages = [user("a"), {"role": "other", "content": "a"}, assistant("b")]
    with pytest.raises(DataError, match=r"f:1: .* leaves out the content of message 2 \(role"):
        texts_of(template, messages, assistant_only=assistant_only)


def test_arguments_of_calls_are_given_as_the_template_takes_them():
    """DeepSeek V3 takes text only, Qwen 3.5 objects only."""
    function = CALL["function"]
    as_text = {**CALL, "function": {**function, "arguments": '{"x": "Paris"}'}}
    for name in ("deepseekv3", "qwen3_5_think"):
        texts = [
            texts_of(trl_template(name), [user("?"), assistant("", tool_calls=[call])], TOOLS)
            for call in (CALL, as_text)
        ]
        assert texts[0] == texts[1]
        assert "Paris" in texts[0][0]


def test_a_template_without_a_loop_cannot_be_masked():
    template = "{{ messages[0].content }}: {{ messages[1].content }}"
    with pytest.raises(DataError, match="does not go over the messages in a loop") as caught:
        texts_of(template, MULTI[:2])
    assert "data.assistant_only_loss" in str(caught.value)
