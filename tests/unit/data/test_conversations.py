"""Conversations as people write them: read, reported or refused, never lost."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from hetero_framework.config import DataConfig
from hetero_framework.data.formats import Formatter
from hetero_framework.data.sources import Record
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import DataError
from tests.unit.data_helpers import (
    CHATML,
    chat,
    make_config,
    tiny_tokenizer,
    trl_template,
    write_jsonl,
)

TEMPLATES = files("trl") / "chat_templates"
NAMES = sorted(
    file.name.removesuffix(".jinja") for file in TEMPLATES.iterdir() if ".j" in file.name
)


def turn(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
CHAT = chat("What is it?", "The fox.")
CALLS = [
    turn("user", "What is two?"),
    turn("assistant", tool_calls=[call("weather", city="Paris")]),
    turn("tool", "12"),
    turn("assistant", "It is four."),
]


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(CHATML if name == "chatml" else trl_template(name))


class Read:
    """Text, trained text and remarks of one example."""

    def __init__(self, fields: dict[str, Any], name: str = "chatml", **settings: Any) -> None:
        self.tokenizer = tokenizer_of(name)
        format_name = "prompt_completion" if "prompt" in fields else "messages"
        options = DataConfig(train="unread", **{"format": format_name, **settings})
        formatter = Formatter(options.format, self.tokenizer, options)
        [(ids, mask)] = formatter([Record("f:7", fields)])
        self.text = self.tokenizer.decode(ids)
        trained = [token for token, bit in zip(ids, mask, strict=True) if bit]
        self.trained = self.tokenizer.decode(trained)
        self.notes = list(formatter.notes)
        self.unused = formatter.unused

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and (
            (self.text, self.trained) == (other.text, other.trained)
        )

    __hash__ = None  # type: ignore[assignment]


def rendered(messages: list[Any], name: str, **arguments: Any) -> str:
    """What transformers writes."""
    return tokenizer_of(name).apply_chat_template(messages, tokenize=False, **arguments)


def refusal(fields: dict[str, Any], name: str = "chatml", **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        Read(fields, name, **settings)
    assert str(caught.value).startswith("f:7")
    return str(caught.value)


# --- roles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "qwen3", "glm4moe"])
@pytest.mark.parametrize("role", ["function_call", "tool_call", "Function Call"])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_calls_and_results_of_sharegpt_equal_those_of_openai(name, role, key):
    said = {"name": "weather", key: {"city": "Paris"}}
    shared = [
        {"from": "human", "value": "What is two?"},
        {"from": role, "value": json.dumps(said)},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "It is four."},
    ]
    settings = {"assistant_only_loss": False} if name in ("qwen3", "glm4moe") else {}
    tools = json.dumps(TOOLS)
    read = Read({"conversations": shared, "tools": tools}, name, **settings)
    assert read.text == rendered(CALLS, name, tools=TOOLS)
    assert read == Read({"messages": CALLS, "tools": TOOLS}, name, **settings)
    assert "Paris" in read.trained
    assert "It is four." in read.trained


def test_several_calls_in_one_turn_and_arguments_as_text():
    calls = [{"name": "weather", "arguments": '{"city": "Paris"}'}] * 2
    shared = [CHAT[0], turn("function_call", json.dumps(calls)), *CALLS[2:]]
    ours = [CHAT[0], turn("assistant", tool_calls=[call("weather", city="Paris")] * 2), *CALLS[2:]]
    assert Read({"messages": shared}, "qwen2_5").text == rendered(ours, "qwen2_5")


@pytest.mark.parametrize(
    ("text", "name"),
    [('{"name": "weather", "arguments": {}}', "chatml"), ("Action: look it up", "qwen2_5")],
)
def test_a_call_that_the_template_does_not_write_is_the_assistants_text(text, name):
    read = Read({"messages": [CHAT[0], turn("function_call", text), *CALLS[2:]]}, name)
    ours = [CHAT[0], turn("assistant", text), *CALLS[2:]]
    assert read.text == rendered(ours, name)
    assert text in read.trained


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *((name, "user") for name in ("human", "Human", "USER", "prompter")),
        *((name, "assistant") for name in ("gpt", "bot", "model", "Assistant", "chatgpt")),
        *((name, "system") for name in ("developer", "System")),
        *((name, "tool") for name in ("observation", "tool_response", "tool-output")),
        *((name, "tool") for name in ("function_response", "function", "ipython")),
    ],
)
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value"), ("from", "content")])
def test_roles_by_other_names(theirs, ours, keys):
    messages = [turn("system", "x"), *CALLS]
    first = next(i for i, message in enumerate(messages) if message["role"] == ours)
    named = dict(zip(keys, (theirs, messages[first].get("content", "b")), strict=True))
    meant = [*messages[:first], turn(ours, named[keys[1]]), *messages[first + 1 :]]
    read = Read({"messages": [*messages[:first], named, *messages[first + 1 :]]}, "qwen2_5")
    assert read == Read({"messages": meant}, "qwen2_5")
    assert read.text == rendered(meant, "qwen2_5")


HERMES = "You may call <tools>[]</tools>"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe", "chatml"])
def test_turns_of_tools_that_are_wrapped_already_are_wrapped_once(name):
    """As NousResearch's Hermes data have them."""
    asked = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    two = "\n</tool_response>\n<tool_response>\n"
    for answer in ("12", f"12{two}13"):
        given = f"<tool_response>\n{answer}\n</tool_response>"
        row = [turn("system", HERMES), CALLS[0], turn("assistant", asked), turn("tool", given)]
        read = Read({"messages": [*row, CALLS[3]], "tools": TOOLS}, name)
        text, count = read.text, answer.count("\n") / 3 + 1
        assert text.count("<tool_response>") == text.count("</tool_response>") == count
        assert text.count("<tool_call>") == text.count("<tools>") == 1
        assert asked in text
    assert ("tools; those beside it" in str(read.notes)) is (name != "chatml")
    both = turn("assistant", asked, tool_calls=CALLS[1]["tool_calls"])
    assert "messages[1] has its calls twice" in refusal({"messages": [CALLS[0], both]}, name)


def test_a_role_that_the_template_names_stays():
    messages = [turn("developer", "Be brief."), *CHAT]
    text = Read({"messages": messages}, "gptoss", assistant_only_loss=False).text
    assert "developer" in trl_template("gptoss")
    assert text == rendered(messages, "gptoss")
    as_tool = [*CALLS[:2], turn("ipython", "12"), *CALLS[3:]]
    assert Read({"messages": as_tool}, "llama3_1").text == rendered(CALLS, "llama3_1")


def test_an_unknown_role_is_named_or_refused():
    messages = [CHAT[0], turn("narrator", "Time goes by."), CHAT[1]]
    read = Read({"messages": messages})
    assert read.text == rendered(messages, "chatml")
    assert "Time" not in read.trained
    [note] = read.notes
    assert "role 'narrator' is not known" in note
    assert "f:7: messages[1]" in note
    said = refusal({"messages": messages}, "qwen2_5")
    assert "leaves out the content of message 2 (role narrator)" in said
    call_as_result = [CHAT[0], turn("function", '{"name": "f", "arguments": {}}'), CHAT[1]]
    assert "the role function has a call as its text" in refusal({"messages": call_as_result})


# --- what the template leaves out ------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_no_template_causes_a_false_alarm(name):
    for messages in (CHAT, [*CHAT, *CHAT], chat(" a ", "\n\nb \n")):
        read = Read({"messages": messages}, name, assistant_only_loss=False)
        if name.startswith(("idefics3", "llava_next", "smolvlm")):  # content in parts alone
            messages = [{**m, "content": [text_part(m["content"])]} for m in messages]
        assert read.text == rendered(messages, name)
        assert read.notes == []


@pytest.mark.parametrize(
    ("name", "messages", "part", "number"),
    [
        ("llama3", CALLS, "tool calls", 2),
        ("qwen2_5_vl", CALLS, "tool calls", 2),
        ("phi3", [*CHAT, turn("tool", "12"), CHAT[1]], "content", 3),
        ("cohere2", [CHAT[0], turn("assistant", "b", tool_calls=[call("f")])], "tool calls", 2),
    ],
)
def test_content_and_calls_that_would_vanish_are_refused(name, messages, part, number):
    said = refusal({"messages": messages}, name, assistant_only_loss=False)
    assert f"leaves out the {part} of message {number} (role" in said


def test_a_template_that_looks_into_the_texts_is_checked_by_the_texts():
    strict = "{% if messages[0].content != 'What is it?' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = tiny_tokenizer(strict + "{{ messages[0].content }}{{ messages[-1].content }}")
    options = DataConfig(train="unread", assistant_only_loss=False)
    formatter = Formatter("messages", tokenizer, options)
    formatter([Record("f:7", {"messages": CHAT})])
    with pytest.raises(DataError, match=r"content of message 2 \(role assistant\)"):
        formatter([Record("f:7", {"messages": [CHAT[0], turn("assistant", "lost"), *CHAT]})])


def test_left_out_thinking_of_earlier_turns_is_reported():
    thought = chat("a", "<think>\nhm\n</think>\n\nb")
    for earlier in (thought, [turn("user", "a"), turn("assistant", "b", reasoning_content="hm")]):
        messages = [*earlier, *CHAT]
        read = Read({"messages": messages}, "qwen3", assistant_only_loss=False)
        assert read.text == rendered(messages, "qwen3")
        assert "hm" not in read.text
        [note] = read.notes
        assert "leaves out thinking (first f:7, 1 in all)" in note
        assert Read({"messages": earlier}, "qwen3", assistant_only_loss=False).notes == []


@pytest.mark.parametrize(
    ("fields", "name", "remark"),
    [
        ({"messages": [CALLS[0], {**CALLS[1], "content": "Wait."}, *CALLS[2:]]}, "llama3_1",
         "leaves out text beside tool calls"),
        ({"messages": CHAT, "tools": TOOLS}, "chatml", "leaves out tools"),
        ({"messages": [{**CHAT[0], "name": "Ann"}, CHAT[1]]}, "qwen2_5", "the field name of"),
        ({"messages": [{**CHAT[0], "time": 12}, CHAT[1]]}, "qwen2_5", "the field time of"),
        ({"messages": CHAT, "chat_template_kwargs": {"enable": 1}}, "qwen3", "not use enable"),
        ({"messages": [CALLS[0], turn("assistant", tool_calls=[
            {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
         ]), *CALLS[2:]]}, "qwen2_5", "writes the arguments of tool calls as quoted text"),
    ],
)  # fmt: skip
def test_fields_that_the_template_ignores_are_named_with_their_place(fields, name, remark):
    read = Read(fields, name, assistant_only_loss=False)
    arguments = {"tools": fields["tools"]} if "tools" in fields else {}
    assert read.text == rendered(fields["messages"], name, **arguments)
    [note] = read.notes
    assert remark in note
    assert "(first f:7, 1 in all)" in note


# --- what stands beside the messages -----------------------------------------------------------


@pytest.mark.parametrize("field", ["system", "system_prompt", "system_message"])
def test_a_system_prompt_of_its_own_is_the_first_message(field):
    whole = [turn("system", "Be brief."), *CHAT]
    read = Read({"messages": CHAT, field: "Be brief."}, "qwen2_5")
    assert read.text == rendered(whole, "qwen2_5")
    assert read == Read({"messages": whole, field: "Be brief. "}, "qwen2_5")
    pair = {"prompt": CHAT[:1], "completion": CHAT[1:], field: "Be brief."}
    assert Read(pair, "qwen2_5").text == read.text
    assert Read({"messages": CHAT, field: ""}, "qwen2_5") == Read({"messages": CHAT}, "qwen2_5")
    assert "two different system prompts" in refusal({"messages": whole, field: "Be long."})
    assert f"field {field} must be a string" in refusal({"messages": CHAT, field: ["a"]})


def test_functions_and_function_call_of_openai_are_tools_and_calls():
    functions = [tool["function"] for tool in TOOLS]
    said = {"name": "weather", "arguments": {"city": "Paris"}}
    for older in (
        turn("assistant", function_call=said),
        turn("assistant", "", function_call=said),
        {"role": "assistant", "content": None, "function_call": said, "tool_calls": None},
    ):
        messages = [CALLS[0], older, turn("function", "12", name="weather"), CALLS[3]]
        for given in (functions, json.dumps(functions)):
            read = Read({"messages": messages, "functions": given}, "qwen2_5")
            assert read.text == rendered(CALLS, "qwen2_5", tools=TOOLS)


PAIR = {"prompt": "a", "completion": "b"}
ALPACA = {"instruction": "a", "output": "b"}


@pytest.mark.parametrize(
    ("fields", "format_name", "message"),
    [
        ({"messages": CHAT, "conversations": CALLS}, "messages", "hold two conversations"),
        ({"messages": CHAT, "tools": TOOLS, "functions": TOOLS}, "messages", "tools in two places"),
        ({"messages": CHAT, "tools": {"a": 1}}, "messages", "tools must be a list, found an obj"),
        ({"messages": CHAT, "tools": 3}, "messages", "tools must be a list, found a number"),
        ({"messages": CHAT, "tools": "{"}, "messages", "tools: not JSON"),
        ({"messages": CHAT, "tools": '[{"a": 1, "a": 2}]'}, "messages", "[0].a: the key"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "messages": CALLS}, "prompt_completion",
         "field messages would not be learned"),
        ({"messages": CHAT, "images": ["a.png"]}, "messages", "field images; only text can be"),
        ({"messages": CHAT, "history": [["a", "b"]]}, "messages", "field history would not be"),
        ({"messages": CHAT, "weight": 0.5}, "messages", "field weight of an example is not used"),
        ({"messages": CHAT[:1], "chosen": {}, "rejected": {}}, "messages", "preference data"),
        ({"messages": CHAT[:1], "kto_tag": True}, "messages", "preference data"),
        ({**PAIR, "system": "Be brief."}, "prompt_completion", "field system would not be learn"),
        ({**PAIR, "context": "x"}, "prompt_completion", "field context would not be learned"),
        ({**PAIR, "tools": TOOLS}, "prompt_completion", "field tools would not be learned"),
        ({**PAIR, "label": True}, "prompt_completion", "fields of KTO's preference data"),
        ({**PAIR, "label": 0}, "prompt_completion", "fields of KTO's preference data"),
        ({**PAIR, "image": b"1"}, "prompt_completion", "field image; only text"),
        ({**ALPACA, "system": "Be brief."}, "alpaca", "field system would not be learned"),
        ({**ALPACA, "history": [["a", "b"]]}, "alpaca", "field history would not be learned"),
        ({**ALPACA, "context": "c"}, "alpaca", "field context would not be learned"),
    ],
)  # fmt: skip
def test_parts_of_an_example_without_a_place_are_refused(fields, format_name, message):
    assert message in refusal(fields, format=format_name)


def test_empty_parts_and_equal_conversations_are_fine():
    empty = {"history": [], "context": "", "system": None, "images": [], "tools": []}
    assert Read({"messages": CHAT, **empty}) == Read({"messages": CHAT})
    shared = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "The fox."}]
    assert Read({"messages": CHAT, "conversations": shared}) == Read({"messages": CHAT})
    assert Read({"messages": None, "conversations": shared}) == Read({"messages": CHAT})
    nulls = [{**message, "tool_calls": None} for message in CHAT]
    assert Read({"messages": nulls}) == Read({"messages": CHAT})
    pair = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    assert Read({**pair, "conversations": shared}) == Read(pair)
    assert Read({**ALPACA, **empty}, format="alpaca").unused == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("{}", "chat_template_kwargs must be an object, found a text"),
        ([], "must be an object, found a list"),
        ({"tokenize": True}, "tokenize is not a variable of chat templates"),
        ({"add_generation_prompt": True}, "add_generation_prompt is not a variable"),
        ({"chat_template": "x"}, "chat_template is not a variable"),
        ({"messages": []}, "messages is not a variable"),
        ({"return_dict": True}, "return_dict is not a variable"),
    ],
)
def test_template_variables_that_are_none_are_refused(kwargs, message):
    assert message in refusal({"messages": CHAT, "chat_template_kwargs": kwargs})
    if isinstance(kwargs, dict):
        with pytest.raises(DataError, match=f"data.chat_template_kwargs: .*{message[-15:]}"):
            Read({"messages": CHAT}, chat_template_kwargs=kwargs)


# --- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma", "llama3_1", "gemma3", "qwen2_5", "lfm2", "smolvlm"])
def test_content_in_parts_is_its_text(name):
    parts = [text_part("What "), {**text_part("is it?"), "image": None}]
    messages = [turn("user", parts), turn("assistant", [text_part("The fox.")])]
    read = Read({"messages": messages}, name, assistant_only_loss=False)
    assert read == Read({"messages": CHAT}, name, assistant_only_loss=False)
    assert "What is it?" in read.text
    assert read.notes == []


WEIGHT = "weight must be 0 or 1, found"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (turn("user", [{"type": "image"}]), "content[0] is of the type 'image'"),
        (turn("user", [{"type": "image_url", "image_url": {}}]), "of the type 'image_url'"),
        (turn("user", [{"type": "text"}]), "content[0] is of the type 'text'"),
        (turn("user", ["a"]), "content[0] is a text"),
        (turn("user", "a", images=["a.png"]), "field images; only text"),
        (turn("user", {"a": 1}), "content must be a string, found an object"),
        *((turn("user", "a", weight=w), f"{WEIGHT} {w}") for w in (2, -1, float("nan"), 0.5)),
        (turn("user", "a", weight=[0]), f"{WEIGHT} a list"),
        (turn("user", "a", weight=True), f"{WEIGHT} a boolean"),
        (turn("user", "a", weight="0"), f"{WEIGHT} a text"),
        (turn("user", "a", loss=False), "field loss, which is not known here"),
        (turn("user", "a", train=0), "field train, which is not known here"),
        (turn("user", "a", mask=1), '"weight": 0'),
        (turn("assistant", tool_calls="["), "tool_calls: not JSON"),
        (turn("assistant", tool_calls=[{"id": 1}]), "tool_calls[0] has no function with a name"),
        (turn("assistant", tool_calls={"id": 1}), "tool_calls must be a list"),
        (turn("assistant", function_call="f"), "function_call must be an object"),
        (turn("assistant", tool_calls=[]), "has no content"),
        (turn("assistant", "b", reasoning_content="a\ud800"), "half of a surrogate pair"),
    ],
)
def test_an_invalid_message_is_refused_with_its_index(message, said):
    text = refusal({"messages": [CHAT[0], message, CHAT[1]]}, "qwen2_5")
    assert said in text
    assert text.startswith("f:7: messages[1]")


@pytest.mark.parametrize("weight", [0, 1, 0.0, 1.0, None])
def test_weights_are_those_of_openai(weight):
    weighted = [{**CHAT[0], "weight": weight}, CHAT[1]]
    assert Read({"messages": weighted}) == Read({"messages": CHAT})


def test_tool_calls_as_text_are_read():
    as_text = [CALLS[0], turn("assistant", tool_calls=json.dumps(CALLS[1]["tool_calls"]))]
    read = Read({"messages": [*as_text, *CALLS[2:]], "tools": json.dumps(TOOLS)}, "qwen2_5")
    assert read.text == rendered(CALLS, "qwen2_5", tools=TOOLS)


def test_typed_columns_and_columns_of_json_are_the_same_data(tmp_path):
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    add = {"name": "add", "description": "a sum", "parameters": parameters}
    added = [CALLS[0], turn("assistant", tool_calls=[call("add", x=2)]), *CALLS[2:]]
    rows = [
        {"messages": CALLS, "tools": TOOLS},
        {"messages": added, "tools": [{"type": "function", "function": add}]},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "typed.parquet"))
    json_column = datasets.List(datasets.Json())
    features = datasets.Features({"messages": json_column, "tools": json_column})
    stored = datasets.Dataset.from_list(rows, features=features)
    stored.to_parquet(str(tmp_path / "json.parquet"))
    stored.save_to_disk(str(tmp_path / "saved"))
    tokenizer = tiny_tokenizer(trl_template("qwen2_5"))
    made = {
        name: load_data(make_config(tmp_path, {"train": name, "max_length": None}), tokenizer)
        for name in ("rows.jsonl", "typed.parquet", "json.parquet", "saved")
    }
    assert len({data.fingerprint for data in made.values()}) == 1
    examples = made["typed.parquet"].examples
    for index, row in enumerate(rows):
        text = rendered(row["messages"], "qwen2_5", tools=row["tools"])
        assert tokenizer.decode(examples[index][0]) == text


def test_genuine_nulls_of_json_stay(tmp_path):
    messages = [CALLS[0], turn("assistant", tool_calls=[call("weather", city=None)]), *CALLS[2:]]
    assert '{"city": null}' in Read({"messages": messages}, "qwen2_5").text


def test_fields_that_are_not_used_are_named_with_an_example(tmp_path):
    write_jsonl(
        tmp_path / "rows.jsonl",
        [{"messages": CHAT, "id": "abc", "score": None}, {"messages": CHAT, "score": 0.5}],
    )
    data = load_data(make_config(tmp_path, {"train": "rows.jsonl"}), tiny_tokenizer(CHATML))
    assert "train: fields that are not used: id ('abc'), score ('0.5')" in data.report
