from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from hetero_framework.config import DataConfig
from hetero_framework.data.batches import num_items, pack
from hetero_framework.data.examples import ExamplesBuilder
from hetero_framework.data.tokenizer import choose_pad_token, load_tokenizer, read_tokenizer
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import DataError
from tests.installed import needs
from tests.unit.data_helpers import (
    CHATML,
    CHATML_MARKED,
    chat,
    make_config,
    tiny_tokenizer,
    write_jsonl,
)

ROWS = [{"text": "The fox " * (index % 4 + 1)} for index in range(11)]


CHAT = [{"messages": chat("a", "b")}]


def load(tmp_path, rows, *, vocab_size=None, tokenizer=None, training=None, **data):
    write_jsonl(tmp_path / "train.jsonl", rows)
    config = make_config(tmp_path, {"train": "train.jsonl", **data}, **(training or {}))
    return load_data(config, tokenizer or tiny_tokenizer(), vocab_size=vocab_size)


def test_load_data_report_says_format_counts_and_padding(tmp_path):
    rows = [*ROWS, {"text": ""}, {"text": "</s>"}]
    data = load(tmp_path, rows, max_length=7)
    lengths = [len(tiny_tokenizer()(row["text"] + "</s>")["input_ids"]) for row in rows]
    cut = sum(length > 7 for length in lengths)
    assert cut > 1
    assert 7 in lengths
    assert len(data.examples) == 11
    assert data.longest == 7
    assert data.report[0].startswith(f"train: 11 examples, {len(data.examples.ids)} tokens from")
    assert data.report[1] == "train: format text (fields text)"
    assert f"{cut} of 13 examples were longer than max_length=7 and were cut" in data.report[2]
    assert data.report[3].startswith("train: 2 of 13 examples have no token to learn from")
    assert data.report[4] == "padding token: </s> (the tokenizer: no pad token)"


def test_load_data_same_rows_from_other_kinds_of_file_are_the_same_data(tmp_path):
    asked, answer = chat("c", "d")
    messages = [*CHAT, {"messages": [asked, {**answer, "name": "fox"}]}]
    datasets.Dataset.from_list(messages).to_parquet(str(tmp_path / "b.parquet"))
    datasets.Dataset.from_list(messages).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "c.json").write_text(json.dumps({"data": messages}, indent=1))
    write_jsonl(tmp_path / "d.jsonl", messages[:1])
    write_jsonl(tmp_path / "e.jsonl", messages[1:])
    tokenizer = tiny_tokenizer(CHATML_MARKED)
    fingerprints = {
        load_data(make_config(tmp_path, {"train": train}), tokenizer).fingerprint
        for train in ("b.parquet", "saved", "c.json", ["d.jsonl", "e.jsonl"], "[de].jsonl")
    }
    assert len(fingerprints) == 1
    assert load(tmp_path, messages, tokenizer=tokenizer).fingerprint in fingerprints
    assert load(tmp_path, messages[::-1], tokenizer=tokenizer).fingerprint not in fingerprints


def test_load_data_report_names_a_part_of_the_data(tmp_path):
    data = load(tmp_path, ROWS, train_split="train[:30%]")
    assert data.report[0].startswith("train: 3 examples, ")
    assert data.report[0].endswith(" from train.jsonl, split train[:30%]")
    load(tmp_path, ROWS, eval="train.jsonl", eval_split="train[8:]")
    with pytest.raises(DataError, match=r"train\.jsonl has no split 'dev', only 'test', 'train'"):
        load(tmp_path, ROWS, eval="train.jsonl", eval_split="dev")


def test_load_data_more_rows_than_one_chunk_keep_their_order(tmp_path):
    rows = [{"text": f"fox {index}"} for index in range(2345)]
    data = load(tmp_path, rows, training={"train_sampling_strategy": "sequential"})
    assert len(data.examples) == 2345
    ids, labels = data.examples[2344]
    assert tiny_tokenizer().decode(ids) == "fox 2344</s>"
    assert ids.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "train.jsonl holds no example"),
        ([{"text": ""}], {}, "none of the 1 examples has a token to learn from"),
        ([{"text": "The quick"}], {"max_length": 1}, "max_length=1 cuts off all of it; raise it"),
        ([{"prompt": "long " * 9, "completion": "x"}], {"max_length": 5}, "max_length=5 cuts off"),
        ([{"text": "a"}, {"body": "b"}], {}, r"train\.jsonl:2: no field text; its fields are body"),
        ([{"text": "a"}], {"format": "alpaca"}, r"train\.jsonl:1: no field instruction"),
        ([{"question": "a"}], {}, "cannot be told from the fields question"),
        ([{"text": "a"}], {"eval": "no.jsonl"}, "data file not found: no.jsonl"),
    ],
)
def test_load_data_unusable_data_is_a_data_error(tmp_path, rows, settings, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, rows, **settings)


def test_load_data_one_empty_file_of_several_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no example"):
        load(tmp_path, ROWS, eval=["train.jsonl", "empty.jsonl"])


def test_load_data_token_beyond_the_embeddings_is_an_error(tmp_path):
    load(tmp_path, ROWS, vocab_size=len(tiny_tokenizer()))
    with pytest.raises(DataError, match=r"train\.jsonl:1: token .* has only 20 embeddings"):
        load(tmp_path, ROWS, vocab_size=20)


def test_eval_batches_cover_every_example_once_in_order(tmp_path):
    write_jsonl(tmp_path / "eval.jsonl", ROWS[:7])
    training = {"per_device_eval_batch_size": 3, "dataloader_drop_last": True}
    data = load(tmp_path, ROWS, eval="eval.jsonl", training=training)
    batches = list(data.eval_batches())
    assert [len(batch["input_ids"]) for batch in batches] == [3, 3, 1]
    examples = data.eval_sets[""]
    assert len(examples) == 7
    total = sum(len(examples[index][0]) - 1 for index in range(7))
    assert sum(num_items([batch]) for batch in batches) == total
    assert torch.equal(batches[2]["input_ids"][0], torch.from_numpy(examples[6][0]))


def test_evaluation_sets_have_names_and_count_for_the_longest_row(tmp_path):
    write_jsonl(tmp_path / "short.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "long.jsonl", [{"text": "word " * 50}])
    sets = {"short": "short.jsonl", "copied": "train.jsonl", "long": ["long.jsonl", "short.jsonl"]}
    data = load(tmp_path, ROWS, eval=sets)
    lengths = {name: len(rows) for name, rows in data.eval_sets.items()}
    assert lengths == {"short": 2, "copied": len(ROWS), "long": 3}
    assert data.longest == data.eval_sets["long"].longest > data.examples.longest
    assert len(data.eval_batches("short")[0]["input_ids"]) == 2
    assert "warning: the evaluation data copied are the training data" in data.report
    assert any(line.startswith("eval.long: 3 examples") for line in data.report)
    assert load(tmp_path, ROWS).eval_sets == {}


DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML_MARKED
ENDLESS = CHATML_MARKED.replace("<|im_end|>", "")
STOP = "may not learn to stop"


@pytest.mark.parametrize(
    ("rows", "template", "files", "remark", "is_said"),
    [
        (ROWS, None, {"eval": "train.jsonl"},
         "warning: the evaluation data are the training data", True),
        ([{"prompt": "the qui", "completion": "ck fox"}], None, {},
         "1 prompts are tokenised differently", True),
        (CHAT, DATED, {}, "today's date", True),
        (CHAT, CHATML_MARKED, {}, STOP, False),
        (CHAT, ENDLESS, {}, STOP, True),
    ],
)  # fmt: skip
def test_load_data_remarks(tmp_path, rows, template, files, remark, is_said):
    data = load(tmp_path, rows, tokenizer=tiny_tokenizer(template), **files)
    assert any(remark in line for line in data.report) == is_said


SAID = chat("What?", "The fox.</s>")


@needs("preferences", "classification")
@pytest.mark.parametrize(
    ("row", "objective", "twice"),
    [
        ({"text": "The fox."}, "sft", "</s>"),
        ({"text": "<s>The fox."}, "sft", "<s></s>"),
        ({"text": "The fox.</s>"}, "sft", "</s>"),  # that of the tokenizer
        ({"prompt": "<s>What?", "completion": " The fox.</s> \n"}, "sft", "<s></s>"),
        ({"messages": SAID}, "sft", "</s>"),
        ({"messages": chat("What?", "The fox.")}, "sft", ""),
        ({"prompt": SAID[:1], "completion": SAID[1:]}, "sft", "</s>"),
        ({"prompt": "<s>What?", "chosen": " It is.", "rejected": " No."}, "dpo", "<s></s>"),
        ({"chosen": "It is.", "rejected": "No."}, "reward", "</s>"),
        ({"text": "The fox.", "label": 1}, "classification", ""),
        ({"text": "<s>The fox.</s>", "label": 1}, "classification", "<s></s>"),
        ({"text": "The</s></s>fox.", "label": 1}, "classification", ""),
        ({"text": "The</s></s>fox.", "text_pair": "A dog.", "label": 1}, "classification", ""),
    ],
)
def test_two_beginnings_or_ends_are_those_of_trl_and_are_named(tmp_path, row, objective, twice):
    template = CHATML.replace("'<|im_end|>' + '\\n'", "'</s>'")
    tokenizer = tiny_tokenizer(template, sep_token="</s>")
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    training = {"objective": objective}
    report = load(tmp_path, [row], tokenizer=tokenizer, training=training).report
    text = r"two (\S+) follow each other.*\(first \S+jsonl:1, 1 in all"
    found = re.findall(text, "\n".join(report))
    assert "".join(dict.fromkeys(found)) == twice
    if row.keys() == {"text"}:  # what SFTTrainer makes of it
        text = row["text"] if row["text"].endswith("</s>") else row["text"] + "</s>"
        ids = tokenizer(text)["input_ids"]
        assert load(tmp_path, [row], tokenizer=tokenizer).examples[0][0].tolist() == ids


def test_a_tokenizer_whose_library_panics_is_refused(tmp_path):
    """Its rules for letters point outside of themselves, which shows once a text is read."""
    tokenizer = tiny_tokenizer()
    rules = normalizers.Precompiled(b"\4\0\0\0" + b"\xff" * 4 + b"x" * 10)
    tokenizer._tokenizer.normalizer = rules
    with pytest.raises(DataError, match="the tokenizer cannot be used: index out of bounds"):
        load(tmp_path, ROWS, tokenizer=tokenizer)


def test_step_batches_use_data_seed_before_seed(tmp_path):
    def first(**training):
        return load(tmp_path, ROWS, training=training).step_batches(0)[0]["input_ids"].tolist()

    assert first(seed=1, data_seed=0) == first(seed=2, data_seed=0) == first(seed=0)
    assert first(seed=1) != first(seed=0)


def test_every_step_has_something_to_learn(tmp_path):
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    data = load(tmp_path, [*ROWS, {"text": ""}], training=training)
    assert data.total_steps == 18
    for step in range(data.total_steps):
        assert all(num_items([batch]) > 0 for batch in data.step_batches(step))


# --- tokenizer -------------------------------------------------------------------------------


def test_load_tokenizer_comes_with_the_model_or_from_model_tokenizer(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    text = "The lazy dog"
    for model in ({"name_or_path": "model"},
                  {"from_config": {"model_type": "llama"}, "tokenizer": "model"}):  # fmt: skip
        tokenizer = load_tokenizer(make_config(tmp_path, model=model))
        assert tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]


def test_load_tokenizer_eos_and_pad_of_the_configuration_replace_its_own(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    tokens = {"train": "a.jsonl", "eos_token": "<|im_end|>", "pad_token": "<s>"}
    tokenizer = load_tokenizer(make_config(tmp_path, tokens))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<s>")
    with pytest.raises(DataError, match=r"data\.pad_token: the tokenizer has no token '<nope>'"):
        load_tokenizer(make_config(tmp_path, {"train": "a.jsonl", "pad_token": "<nope>"}))


def test_load_tokenizer_has_the_template_of_the_configuration(tmp_path):
    """A result is written with it, as by SFTTrainer."""
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    config = make_config(tmp_path, {"train": "a.jsonl", "chat_template_path": "x.jinja"})
    with pytest.raises(DataError, match="chat_template_path: cannot read"):
        load_tokenizer(config)
    (tmp_path / "x.jinja").write_text(CHATML_MARKED)
    load_tokenizer(config).save_pretrained(tmp_path / "result")
    assert (tmp_path / "result" / "chat_template.jinja").read_text() == CHATML_MARKED


@pytest.mark.filterwarnings("ignore:This sequence already has </s>:UserWarning")
def test_load_tokenizer_written_in_python_works_for_text(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "fox"}, {"text": "a</s>"}])
    config = make_config(tmp_path, {"train": "a.jsonl"})
    tokenizer = load_tokenizer(config)
    assert not tokenizer.is_fast
    ids = [load_data(config, tokenizer).examples[index][0].tolist() for index in range(2)]
    assert ids == [tokenizer(text)["input_ids"] for text in ("fox</s>", "a</s>")]
    write_jsonl(tmp_path / "a.jsonl", CHAT)
    tokenizer.chat_template = CHATML_MARKED
    with pytest.raises(DataError, match="a tokenizer written in Python"):
        load_data(config, tokenizer)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
PAGE_OF_HTML = "<!doctype html>\n<html>"
ODD_BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}
CODE = {"auto_map": {"AutoTokenizer": ["code.Mine", None]}}
SETTINGS = "tokenizer_config.json"
FILES = ("tokenizer.json", "tokenizer.model", SETTINGS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *((file, POINTER, rf"{file} is a Git LFS pointer, not the") for file in FILES),
        *((file, PAGE_OF_HTML, rf"{file} is an HTML page, not the file") for file in FILES),
        (SETTINGS, CODE, "code of its own .auto_map., which is never run"),
        (SETTINGS, {"auto_map": None}, r"has null where code of its own is named .auto_map."),
        (SETTINGS, {"tokenizer_class": 7}, "cannot load a tokenizer from .*model"),
        ("tokenizer.json", '{"version": ', r"tokenizer\.json is not readable JSON"),
        ("tokenizer.json", json.dumps({"version": "1.0", "added_tokens": [], "model": ODD_BPE}),
         "cannot load a tokenizer from .*out of vocabulary"),
        ("tokenizer.json", '{"version": "1.0"}', r"cannot load a tokenizer from"),
    ],
)  # fmt: skip
def test_load_tokenizer_unusable_names_the_setting(tmp_path, monkeypatch, file, content, message):
    """A file has other content, or other settings."""
    folder = tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    if isinstance(content, dict):
        content = json.dumps({**json.loads((folder / file).read_text()), **content})
    (folder / file).write_text(content)
    assert_refused(tmp_path, monkeypatch, message)


BARE = json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "cannot load a tokenizer from .*model"),
        ({}, "holds no tokenizer files"),
        ({SETTINGS: BARE}, "has no vocabulary|cannot load a tokenizer"),
    ],
)
def test_load_tokenizer_without_its_files_names_the_setting(tmp_path, monkeypatch, files, message):
    if files is not None:
        (tmp_path / "model").mkdir()
        for name, content in files.items():
            (tmp_path / "model" / name).write_text(content)
    assert_refused(tmp_path, monkeypatch, message)


def assert_refused(base_dir: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(make_config(base_dir))
    assert re.search(r"model\.tokenizer|git lfs pull|without access", str(caught.value))


def test_load_tokenizer_random_weights_need_model_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer(.|\n)*model\.tokenizer"):
        load_tokenizer(make_config(tmp_path, model={"from_config": {"model_type": "llama"}}))


@pytest.mark.parametrize(
    ("tokens", "missing", "token", "sentence"),
    [
        ({"pad_token": "<|end|>"}, 0, "<|end|>", "padding token: <|end|>"),
        ({"unk_token": "<s>"}, 0, "</s>", "padding token: </s> (the tokenizer: no pad token)"),
        ({"eos_token": None, "unk_token": "<s>"}, 0, "<s>", "no pad token, no eos token"),
        ({"pad_token": "<added>"}, 1, "</s>", "<added> is beyond the model's vocabulary"),
    ],
)
def test_choose_pad_token_falls_back_and_says_so(tokens, missing, token, sentence):
    tokenizer = tiny_tokenizer(**tokens)
    index, said = choose_pad_token(tokenizer, len(tokenizer) - missing)
    assert index == tokenizer.convert_tokens_to_ids(token)
    assert sentence in said


def test_choose_pad_token_without_a_choice_names_the_setting():
    with pytest.raises(DataError, match=r"no token to pad with(.|\n)*data\.pad_token"):
        choose_pad_token(tiny_tokenizer(eos_token=None))


def test_padding_free_makes_one_row_of_each_micro_batch(tmp_path):
    files = {"eval": "train.jsonl", "padding_free": True}
    training = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3}
    padded = load(tmp_path, ROWS, eval="train.jsonl", training=training)
    packed = load(tmp_path, ROWS, training=training, **files)
    pairs = zip(
        [*packed.step_batches(0), *packed.eval_batches()],
        [*padded.step_batches(0), *padded.eval_batches()],
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.keys() == {"input_ids", "position_ids", "labels"}
        kept = theirs["attention_mask"].bool()
        assert torch.equal(ours["input_ids"][0], theirs["input_ids"][kept])
        assert num_items([ours]) == num_items([theirs])
    assert "no padding: the samples of a micro-batch make one row" in packed.report


def test_padding_free_needs_no_token_to_pad_with(tmp_path):
    tokenizer = tiny_tokenizer(eos_token=None)
    load(tmp_path, ROWS, tokenizer=tokenizer, padding_free=True, add_eos=False)
    with pytest.raises(DataError, match="no token to pad with"):
        load(tmp_path, ROWS, tokenizer=tokenizer, add_eos=False)


@pytest.mark.parametrize(("multiple", "tokens"), [(None, 8), (3, 9), (8, 8), (64, 64)])
def test_row_tokens_counts_the_padding_of_the_longest_row(tmp_path, multiple, tokens):
    data = load(tmp_path, ROWS, max_length=8, pad_to_multiple_of=multiple)
    assert (data.longest, data.row_tokens) == (8, tokens)
    assert max(batch["input_ids"].shape[1] for batch in data.step_batches(0)) <= tokens


# --- docs/data.md ----------------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")


def examples_of_the_page() -> list[tuple[str, str]]:
    """Heading and content of each ```jsonl block."""
    sections = re.split(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)[1:]
    return [
        (heading, block)
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
        for block in re.findall(r"```jsonl\n(.*?)```", body, re.DOTALL)
    ]


@pytest.mark.parametrize(("heading", "block"), examples_of_the_page())
def test_examples_of_the_page_have_the_format_of_their_heading(tmp_path, heading, block):
    (tmp_path / "a.jsonl").write_text(block, encoding="utf-8")
    tokenizer = tiny_tokenizer(CHATML_MARKED)
    data = load_data(make_config(tmp_path, {"train": "a.jsonl"}), tokenizer)
    assert len(data.examples) == len(block.splitlines())
    assert any(f"format {heading} " in line for line in data.report)


def test_configurations_of_the_page_are_valid():
    blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 10
    assert len(examples_of_the_page()) == 8
    for block in blocks:
        DataConfig.model_validate_json(block)


def test_the_row_without_padding_on_the_page_is_that_of_training():
    builder = ExamplesBuilder()
    for ids in ([8, 9], [5, 6, 7]):
        builder.add(ids, [True] * len(ids))
    for name, row in pack(builder.build(), [0, 1]).items():
        assert f"| `{name}` | {' '.join(map(str, row[0].tolist()))} |" in PAGE


def test_the_chat_template_of_an_older_processor_is_the_tokenizers(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert read_tokenizer(str(tmp_path), None).chat_template == CHATML
    tiny_tokenizer(CHATML_MARKED).save_pretrained(tmp_path)
    assert read_tokenizer(str(tmp_path), None).chat_template == CHATML_MARKED
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(DataError, match=r"chat_template\.json"):
        read_tokenizer(str(tmp_path), None)
