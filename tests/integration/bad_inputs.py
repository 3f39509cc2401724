"""The rows of wrong inputs as data; test_bad_input_rows.py runs them.

A row is a number of the table of bad inputs (25 to 110; frames, checkpoints and keys have their own
tests), what to change in a small valid configuration, and what the user must then read.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.samples import free_ports, plan_of

LOCAL = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """`prepare(folder)` changes files, `config` the configuration; `text` replaces it whole. What
    is said must match all of `says`, in the error, or anywhere in the output when `code` is 0."""

    id: str
    says: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    prepare: Change = lambda folder: None
    text: str | bytes | None = None
    command: str = "train"
    options: tuple[str, ...] = ()
    code: int = 2
    elsewhere: bool = False  # the worker's address stands for another machine


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with changes; None takes a key out of a section."""
    found = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        found[key] = merged(base[key], value) if both else value
    return {key: value for key, value in found.items() if value is not None}


def configuration(changes: dict[str, Any]) -> dict[str, Any]:
    """A small valid one of one process, with changes."""
    base = {
        "coordinator": {**LOCAL, "port": free_ports(1)[0]},
        "workers": [],
        "shard_plan": plan_of(("local", 4)),
        "model": {"name_or_path": "./model"},
        "adapter": {"r": 2},
        "data": {"train": "good.jsonl", "max_length": 64},
        "training": {
            **{"output_dir": "run", "max_steps": 1, "per_device_train_batch_size": 2},
            **{"save_strategy": "no", "report_to": "none", "visualize": False},
            "verify_architecture": False,
        },
    }
    return merged(base, changes)


def row(id: str, *says: str, **how: Any) -> Row:
    return Row(id, says, **how)


def plan(*ranges: tuple[Any, int, int]) -> dict[str, Any]:
    return {"shard_plan": [{"id": id, "start": a, "end": b} for id, a, b in ranges]}


def workers(*entries: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Layers for each of these entries of `workers`, whatever is wrong with them."""
    made = [{**LOCAL, "id": n, "port": 9100 + n, **entry} for n, entry in enumerate(entries, 1)]
    first = 4 - len(made)
    ranges = [("local", 0, first), *((w["id"], n, n + 1) for n, w in enumerate(made, first))]
    return {"workers": made, **plan(*ranges), **sections}


def data(content: str | bytes, name: str = "x.jsonl") -> dict[str, Any]:
    """Training data of this content."""

    def write(folder: Path) -> None:
        raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (folder / name).write_bytes(raw)

    return {"config": {"data": {"train": name}}, "prepare": write}


def edited(file: str, **fields: Any) -> dict[str, Any]:
    """A JSON file of the model with other fields; None takes one out."""

    def edit(folder: Path) -> None:
        path = folder / "model" / file
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({k: v for k, v in {**known, **fields}.items() if v is not None}))

    return {"prepare": edit}


def weights(change: Callable[[bytes], bytes]) -> dict[str, Any]:
    """The model's weights, changed as bytes."""

    def spoil(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return {"prepare": spoil}


def header(**tensors: Any) -> Callable[[bytes], bytes]:
    """A safetensors file with this header and 64 bytes behind it."""
    text = json.dumps(tensors).encode()
    return lambda old: struct.pack("<Q", len(text)) + text + bytes(64)


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def index(name: str) -> Change:
    def write(folder: Path) -> None:
        content = {"weight_map": {"lm_head.weight": name}}
        (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(content))
        (folder / "model" / "model.safetensors").unlink()  # it would be read instead

    return write


def with_nan(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def only_bin(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def chat(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "a b"} for role in roles]})


def of(section: str, **fields: Any) -> dict[str, Any]:
    """A section of the configuration with other fields."""
    return {"config": {section: fields}}


def trained(**settings: Any) -> dict[str, Any]:
    return of("training", **settings)


TEXT = '{"text": "the a model trains"}\n'
RAISES = "{{ raise_exception('no such role') }}"
NO_CONNECTION = {"training": {"connect_timeout_s": 0.5}}

ROWS = [
    # -- the configuration file
    row(
        "25-missing", r"none\.json does not exist", "hetero init", options=("--config", "none.json")
    ),
    row("25-directory", "model is a directory", options=("--config", "model")),
    row(
        "25-below-a-file", r"good\.jsonl.x", "Not a directory", options=("--config", "good.jsonl/x")
    ),
    row("26-empty", r"config\.json is empty", "hetero init", text=""),
    row("26-value", "line 2, column 7: not valid JSON", text='{"a": 1,\n"b": {,}}'),
    row("26-cut", "line 1, column", text='{"version": "1"'),
    row("26-comma", "line [23], column", "not valid JSON", text='{\n"version": "1",\n}'),
    row("26-comment", "line 2, column 1", "not valid JSON", text='{\n// x\n"version": "1"}'),
    row("27-utf16", r"config\.json is UTF-16", "save it as UTF-8", text="{}".encode("utf-16")),
    row("27-latin", "line 1: byte 0xe4 is not UTF-8", text='{"ä": 1}'.encode("latin-1")),
    row(
        "28",
        r'training\.seed: the key "seed" is given twice; keep one',
        text='{"training": {\n"seed": 1,\n"seed": 2}}',
    ),
    row("29-nan", r"training\.seed: .*not finite", text='{"training": {"seed": NaN}}'),
    row("29-huge", r"learning_rate: .*not finite", text='{"training": {"learning_rate": 1e999}}'),
    row(
        "30",
        r"training\.gradient_acumulation_steps",
        'did you mean "gradient_accumulation_steps"',
        **trained(gradient_acumulation_steps=2),
    ),
    row("31", r"coordinator\.ip: is missing \(Address", **of("coordinator", ip=None)),
    row("32-text", r"coordinator\.port: must be a whole", **of("coordinator", port="99")),
    row("32-bool", r"coordinator\.port: .*not true", **of("coordinator", port=True)),
    row("33-zero", r"coordinator\.port: .*at least 1", **of("coordinator", port=0)),
    row("33-large", r"port: .*at most 65535", **of("coordinator", port=70000)),
    row("34", r"\[1\]\.start: is 2.* start it at 3", config=plan(("local", 0, 3), ("local", 2, 4))),
    row(
        "35-gap",
        r"shard_plan\[1\].* nobody holds layer 1",
        config=plan(("local", 0, 1), ("local", 2, 4)),
    ),
    # 35: an entry without layers is legal: it holds the embedding, or norm and head.
    row("35-negative", r"shard_plan\[0\]\.start", config=plan(("local", -1, 4))),
    row(
        "35-order",
        r"shard_plan\[0\].* must start at 0",
        config=plan(("local", 2, 4), ("local", 0, 2)),
    ),
    row("35-short", "nobody holds layer 3\n", "end at 4", config=plan(("local", 0, 3))),
    row("36", r"shard_plan\[0\]\.end is 9", "model has 4", config=plan(("local", 0, 9))),
    row("37-none", r"shard_plan: must not be empty", config={"shard_plan": []}),
    row(
        "37-unknown",
        r"shard_plan\[1\]\.id: 7 is not a worker",
        config=plan(("local", 0, 2), (7, 2, 4)),
    ),
    # 37, a worker without a stage, and 39, tied embeddings on two stages, work here.
    row("40-interval", r"training\.save_steps: must be greater than 0", **trained(save_steps=0)),
    row("40-keep", r"save_total_limit: must be at least 1", **trained(save_total_limit=0)),
    # 41: a learning rate of 0 is legal, as in transformers.
    row("41-negative", r"learning_rate: must be at least 0", **trained(learning_rate=-1.0)),
    row("41-text", r'learning_rate: must be a number.*"2e-4"', **trained(learning_rate="2e-4")),
    row(
        "42-accumulation",
        r"gradient_accumulation_steps: must be at least 1",
        **trained(gradient_accumulation_steps=0),
    ),
    row("42-batch", r"batch_size: must be at least 1", **trained(per_device_train_batch_size=0)),
    row("43", r"training\.adam_beta2: must be less than 1", **trained(adam_beta2=1.0)),
    row("43-list", r"training\.betas", **trained(betas=[0.9, 0.9, 0.9])),
    row("43-name", r"training\.optim: 'adamm'", "one of: .*sgd", **trained(optim="adamm")),
    row("44-dropout", r"lora_dropout: must be less than 1", **of("adapter", lora_dropout=1.5)),
    row("44-clip", r"max_grad_norm: must be at least 0", **trained(max_grad_norm=-1.0)),
    row("45-rank", r"adapter\.r: must be at least 1", **of("adapter", r=0)),
    row(
        "45-module",
        "nope_proj",
        "modules that can be named: .*q_proj",
        **of("adapter", target_modules=["nope_proj"]),
    ),
    row("46-cuda", "cuda:77", "cpu", **of("coordinator", device="cuda:77")),
    row("46-rocm", "rocm", "cpu", **of("coordinator", device="rocm:9")),
    row("46-word", r'coordinator\.device: "gpu" is no', **of("coordinator", device="gpu")),
    row("47", r"model\.dtype: must be .*float16", **of("model", dtype="fp8")),
    row(
        "48",
        r"training\.fp16: needs float32 weights",
        config={"model": {"dtype": "float16"}, "training": {"fp16": True}, "adapter": None},
    ),
    row("48-both", "bf16 and fp16 exclude", **trained(fp16=True, bf16=True)),
    row("49-brackets", "without brackets", config=workers({"ip": "[fd00::2]"}, {})),
    row("49-port", 'the port goes into "port"', config=workers({"ip": "box:9999"}, {})),
    row("49-url", "without scheme", config=workers({"ip": "tcp://box"}, {})),
    row(
        "49-name",
        r"cannot reach worker 1 at far\.invalid:9101: the name 'far\.invalid' is not known",
        "check the spelling",
        config=workers({"ip": "far.invalid", "hostname": "far"}, **NO_CONNECTION),
        options=("--insecure-plaintext",),  # else the absent key is said first
    ),
    # 50: the coordinator does not listen here, workers do.
    row(
        "50",
        r"cannot listen on 198\.51\.100\.7:9101: this machine does not have the address",
        r"it has ",
        config=workers({"ip": "198.51.100.7"}, {}),
        command="worker",
        options=("--worker-id", "1", "--insecure-plaintext"),
    ),
    row("51-id", r"workers\[1\]\.id: 1 is the id of", config=workers({}, {"id": 1})),
    row("51-port", r"workers\[1\]\.port", "give each", config=workers({}, {"port": 9101})),
    # 52: CON is not a device where files are called worker-CON.log.
    *(
        row(
            f"52-{name}",
            r"workers\[0\]\.id",
            r"1 to 64 letters|control",
            config=workers({"id": id}, {}),
        )
        for name, id in {
            "up": "../x",
            "slash": "a/b",
            "empty": "",
            "long": "a" * 300,
            "nul": "a\0b",
            "dots": "..",
            "escape": "\x1b[2J",
        }.items()
    ),
    row(
        "53-file", "output_dir", "it is a file", "--output-dir", **trained(output_dir="good.jsonl")
    ),
    row("53-below", r"training\.output_dir", **trained(output_dir="good.jsonl/run")),
    row("53-system", r"training\.output_dir", "/proc/none", **trained(output_dir="/proc/none")),
    row("53-nul", r"training\.output_dir", **trained(output_dir="a\0b")),
    # 54: a run starts afresh in the directory of another one and keeps its files aside.
    row(
        "55-model", r"trust_remote_code", "never run", **of("model", **{"trust_remote_code": True})
    ),
    row("55-top", "trust_remote_code.*never run", config={"trust_remote_code": True}),
    row("56-token", r"model\.token", "HF_TOKEN", **of("model", token="hf_" + "a1" * 17)),
    row("56-hub", r"hub_token", "HF_TOKEN", **trained(hub_token="x")),
    row(
        "56-key",
        r"model\.tokenizer: holds a secret",
        **of("model", tokenizer="-----BEGIN PRIVATE KEY-----\nMIIEvQ\n"),
    ),
    row(
        "56-value",
        r"data\.dataset_config: holds a secret",
        **of("data", dataset_config="hf_" + "Ab1" * 12),
    ),
    # -- data and tokenizer
    row(
        "57-missing",
        r"data file not found: none\.jsonl",
        "looked",
        **of("data", train="none.jsonl"),
    ),
    row("57-pattern", r"no file matches none\*\.jsonl", **of("data", train="none*.jsonl")),
    row("57-none", r"x\.jsonl holds no example", **data("")),
    row("58-json", r"x\.jsonl:2: not JSON .*: \{nope", **data(TEXT + "{nope\n")),
    row("58-object", r"x\.jsonl:1: expected a JSON object, found a list", **data("[1]\n")),
    row("59", r"x\.jsonl:1", "fields foo, bar", **data('{"foo": 1, "bar": 2}\n')),
    row("59-later", r"x\.jsonl:2.*text", **data(TEXT + '{"txet": "a"}\n')),
    *(
        row(f"60-{name}", r"x\.jsonl:2.*text.* a string", **data(f'{TEXT}{{"text": {value}}}\n'))
        for name, value in {"null": "null", "number": "5", "list": '["a"]'}.items()
    ),
    row("61-utf8", r"x\.jsonl:2: byte \d+ is not valid UTF-8", **data(TEXT.encode() + b'{"\xff"}')),
    row("61-surrogate", r"x\.jsonl:1.*half of a surrogate pair", **data('{"text": "\\ud800 a"}\n')),
    row(
        "62",
        r"train: 2 examples",
        code=0,
        **data(b"\xef\xbb\xbf" + (TEXT + "\r\n" + TEXT).encode()),
    ),
    row(
        "63",
        r"x\.jsonl:2: the line is longer than 16 MiB",
        **data(TEXT + '{"text": "' + "a" * (17 * 2**20) + '"}\n'),
    ),
    row("64-parquet", r"x\.jsonl is not|x\.jsonl.*[Pp]arquet", **data(b"PAR1....PAR1")),
    row("64-gzip", r"x\.jsonl: damaged gzip", **data(gzip.compress(TEXT.encode())[:20])),
    row("64-zip", r"x\.jsonl holds zip data", **data(b"PK\x03\x04....")),
    row("64-csv", r"x\.csv:2: a row of 1 cells", **data("a,b\n1\n", "x.csv")),
    row("65-name", r"x\.pkl is a pickled format", **data(b"", "x.pkl")),
    row("65-bin", r"x\.bin is a pickled format", **data(b"", "x.bin")),
    row("65-magic", r"x\.jsonl holds pickle data", **data(b"\x80\x04}.")),
    row(
        "66-twice",
        r"warning: data\.train names \./good\.jsonl twice",
        code=0,
        **of("data", train=["good.jsonl", "./good.jsonl"]),
    ),
    row(
        "66-eval",
        "warning: the evaluation data are the training data",
        code=0,
        config={"data": {"eval": "good.jsonl"}, "training": {"eval_steps": 2}},
    ),
    row(
        "67",
        "6 of 6 examples were longer than max_length=4 and were cut",
        code=0,
        **of("data", max_length=4),
    ),
    row(
        "68",
        r"none of the .* examples has a token to learn from",
        "data.max_length=2 cuts off all",
        **of("data", train="x.jsonl", max_length=2),
        prepare=lambda folder: (folder / "x.jsonl").write_text(
            json.dumps({"prompt": "the a model trains on", "completion": "many"})
        ),
    ),
    # 69: an example without a label is left out, and counted, before batches are made of them.
    row(
        "69",
        "1 of 2 examples have no token to learn from",
        code=0,
        **{
            **data(TEXT + '{"text": "a"}\n'),
            "config": {"data": {"train": "x.jsonl", "add_eos": False}},
        },
    ),
    row(
        "70",
        "1 examples do not fill one micro-batch of 2",
        "set it to false",
        **{
            **data(TEXT),
            "config": {"data": {"train": "x.jsonl"}, "training": {"dataloader_drop_last": True}},
        },
    ),
    row("71-missing", "there is no folder .*none", **of("model", tokenizer="./none")),
    row(
        "71-vocab",
        r"good\.jsonl:1: token .* has the id \d+, but the model has only 50 embeddings",
        "belong together",
        **edited("config.json", vocab_size=50),
    ),
    row("72", "padding token: <pad>", code=0),
    row("73-absent", "tokenizer has no chat template", "chat_template_path", **data(chat("user"))),
    row(
        "73-raises",
        "chat template",
        "no such role",
        **of("data", train="x.jsonl", chat_template_path="t.jinja"),
        prepare=lambda folder: (
            (folder / "t.jinja").write_text(RAISES),
            (folder / "x.jsonl").write_text(chat("user", "assistant")),
        ),
    ),
    row(
        "73-syntax",
        "chat template",
        **of("data", train="x.jsonl", chat_template_path="t.jinja"),
        prepare=lambda folder: (
            (folder / "t.jinja").write_text("{% for %}"),
            (folder / "x.jsonl").write_text(chat("user", "assistant")),
        ),
    ),
    row(
        "74",
        r"tokenizer_config\.json names code of its own \(auto_map\)",
        **edited("tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}),
    ),
    row(
        "75-malformed",
        r"tokenizer\.json",
        prepare=lambda folder: (folder / "model" / "tokenizer.json").write_text('{"version": '),
    ),
    row(
        "75-huge",
        r"tokenizer\.json has 500 MiB, more than the 256 read",
        prepare=lambda folder: os.truncate(folder / "model" / "tokenizer.json", 500 << 20),
    ),
    # 76, changed data at a resume, is in test_resume.py.
    # -- the model's files
    row(
        "77-none",
        "no model directory .*none",
        r"model\.name_or_path",
        **of("model", name_or_path="./none"),
    ),
    row(
        "77-config",
        r"model.*has no config\.json",
        prepare=lambda folder: (folder / "model" / "config.json").unlink(),
    ),
    row("77-bin", "only safetensors are read", "save_pretrained", prepare=only_bin),
    row("78-absent", r"lacks its file a\.safetensors", prepare=index("a.safetensors")),
    row("78-up", r"index\.json .*'\.\./\.\./etc/passwd'", prepare=index("../../etc/passwd")),
    row("78-root", r"index\.json .*'/etc/passwd'", prepare=index("/etc/passwd")),
    row(
        "79", r"model\.safetensors cannot be read", "download it again", **weights(lambda b: b[:-9])
    ),
    row("79-empty", r"model\.safetensors cannot be read", **weights(lambda b: b"")),
    row(
        "80",
        r"model\.safetensors cannot be read: .*header too large",
        **weights(lambda b: struct.pack("<Q", 2**40) + b[8:]),
    ),
    *(
        row(f"81-{name}", r"model\.safetensors cannot be read", **weights(header(**tensors)))
        for name, tensors in {
            "overlap": {"a": tensor("F32", [8], 0, 32), "b": tensor("F32", [8], 16, 48)},
            "hole": {"a": tensor("F32", [4], 0, 16), "b": tensor("F32", [8], 32, 64)},
            "overflow": {"a": tensor("F32", [2**62, 2**62], 0, 64)},
            "dtype": {"a": tensor("X99", [16], 0, 64)},
        }.items()
    ),
    row(
        "82",
        r"model\.safetensors is a Git LFS pointer",
        "git lfs pull",
        **weights(lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ),
    row(
        "83-pickle",
        r"model\.safetensors is not .*pickled data",
        **weights(lambda b: b"\x80\x04" + b),
    ),
    row(
        "83-zip", r"model\.safetensors is not .*zip archive", **weights(lambda b: b"PK\x03\x04" + b)
    ),
    row(
        "84",
        r"layers\.1\.mlp\.up_proj\.weight .*holds 3 numbers",
        "infinite or NaN",
        prepare=with_nan,
    ),
    row(
        "85",
        r"config\.json names the attention's code",
        **edited("config.json", _attn_implementation_internal="a/b"),
    ),
    # 86: a branch is not refused; `hetero doctor --config` names the commit to write.
    row("86-none", "'no/such'", "hub", **of("model", name_or_path="no/such")),
    # -- the command line
    row("97", "there is no command 'trian'; did you mean train", command="trian"),
    row("98", "unrecognized.*--jsno; did you mean --json", options=("--jsno",), command="check"),
    row("100-show", "'-1' is not a whole number", options=("--show", "-1"), command="check"),
    row("100-word", "'abc' is not a whole number", options=("--show", "abc"), command="check"),
    row("100-resume", "'abc' is neither", options=("--resume", "abc")),
    row("100-set", r"--set .* is not of the form", options=("--set", "nonsense")),
    row(
        "100-set-value", r"training\.max_steps: must be", options=("--set", "training.max_steps=a")
    ),
    row(
        "109-refused",
        "cannot reach worker 1 at .*nothing listens on that port",
        r"cannot reach worker 1 at 127\.0\.0\.1:1: .*\(tried \d+ times in",
        "start the worker there",
        config=workers({"port": 1}, **NO_CONNECTION),
        elsewhere=True,
    ),
]
