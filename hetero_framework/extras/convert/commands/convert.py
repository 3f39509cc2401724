"""`hetero convert`: makes a configuration from one of axolotl, LLaMA-Factory or TRL, or from a
command line of TRL."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from hetero_framework.commands.init import Answers, beside, prepare_machines, propose
from hetero_framework.commands.options import (
    DEFAULT_CONFIG,
    JSON,
    at_least,
    repeated,
    report,
    value,
    writes,
)
from hetero_framework.config import Config
from hetero_framework.config.problems import shown
from hetero_framework.config.strict_json import parse_object
from hetero_framework.core import addresses
from hetero_framework.core.files import refuse_output, write_file
from hetero_framework.errors import ConfigError, UserError, in_words
from hetero_framework.extras.convert.convert import CHANGED, STATUSES, Conversion, program_of

EXAMPLES = """
    hetero convert qlora.yml
    hetero convert sft.txt --worker 192.168.1.20 --worker 192.168.1.30:9999:mps
    hetero convert llama3_lora_sft.yaml --world-size 4
    hetero convert sft_config.json --model Qwen/Qwen2.5-0.5B --data train.jsonl
    """
_HOST = "HOST[:PORT[:DEVICE]]"
_OUTPUT = f"default: {DEFAULT_CONFIG}"
_WORLD_SIZE = "processes of the other run: a step had the samples of all"
OPTIONS = (
    value("file", "FILE", "a YAML or JSON file, or a text with a command line of TRL"),
    *writes(_OUTPUT, "-o", "--output", default=DEFAULT_CONFIG),
    value("--model", "NAME", "model, where FILE names none"),
    value("--data", "FILE", "training data, where FILE names none"),
    value("--world-size", "N", _WORLD_SIZE, type=at_least(1)),
    repeated("--worker", _HOST, "a worker, as in hetero init; may be repeated", dest="workers"),
    value("--coordinator", _HOST, "the coordinator (default: this machine)"),
    JSON,
)
# Keys that only hold the fields of a class.
_CLASSES = re.compile(
    "(sft|peft|lora|model)_config|(training_|model_|script_)?args|model_init_kwargs"
    "|(SFT|Lora|Model)Config|ScriptArguments|(?P<method>DPO|ORPO|CPO|KTO|Reward)Config"
)
_FILES = (".yaml", ".yml", ".json")
_OF_A_SHELL = re.compile(r".*[$`].*|;.*|[|&]+|\d?>.*|<", re.DOTALL)


def run(arguments: argparse.Namespace) -> int:
    file, output = Path(arguments.file), Path(arguments.output)
    made, raw = _converted(file, arguments)
    refuse_output(output, overwrite=arguments.overwrite, inputs=[file])
    config = Config.from_dict(raw, output.absolute().parent, name=f"what {file} becomes")
    write_file(output, json.dumps(raw, indent=2, ensure_ascii=False).encode() + b"\n")
    data = {
        "program": made.program,
        "output": str(output),
        "keys": [{**vars(row), "to": {p: made.settings[p] for p in row.to}} for row in made.rows],
        "defaults": made.defaults,
        "notes": list(_notes(config, made.world_size)),
    }
    report(arguments, data, _text)
    if config.workers:
        with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            prepare_machines(config, output)
    return 0


def _converted(file: Path, arguments: argparse.Namespace) -> tuple[Conversion, dict[str, Any]]:
    """The conversion of a file, and the whole file that it becomes."""
    keys, program = read_recipe(file)
    named = {"model.name_or_path": arguments.model, "data.train": arguments.data}
    given = {name: value for name, value in named.items() if value}
    try:
        made = Conversion(program, keys, arguments.world_size or 0, given)
        return made, _whole_file(made, arguments)
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"{file} has a value of another kind than {program} takes: {error}"
        raise UserError(problem, hint="--debug shows where") from error


def _whole_file(made: Conversion, arguments: argparse.Namespace) -> dict[str, Any]:
    """The converted sections with the machines of the options; the plan is left to the run."""
    sections = made.sections(lambda text: str(beside(text, Path(arguments.output).absolute())))
    name, adapter = sections["model"]["name_or_path"], "lora"
    if sections["model"].get("quantization"):
        adapter = "qlora"
    answers = Answers(name, arguments.workers, arguments.coordinator, adapter=adapter)
    hostname, own = addresses.local_hostnames()[0], addresses.primary_address()
    return {**propose(answers, None, hostname=hostname, own_address=own), **sections}


def _notes(config: Config, world_size: int) -> Iterator[str]:
    micro = config.training.per_device_train_batch_size
    count = config.training.gradient_accumulation_steps
    there = "" if world_size > 1 else "; there of each GPU, and --world-size N counts N of them"
    yield f"a step has {micro} x {count} = {micro * count} samples on any number of machines{there}"
    if not config.workers:
        yield "no workers yet: convert again with --worker HOST, or add them to the file"


def _text(data: dict[str, Any]) -> str:
    lines = [f"{data['program']}: {len(data['keys'])} keys"]
    for status in STATUSES:
        rows = [row for row in data["keys"] if row["status"] == status]
        lines += ["", f"{status}:"] * bool(rows)
        for row in (row for row in rows if row["to"]):
            to = (p + f" = {shown(v)}" * (status == CHANGED) for p, v in row["to"].items())
            why = f": {row['why']}" if row["why"] else ""
            lines.append(f"  {row['key']} {shown(row['value'])} -> {', '.join(to)}{why}")
        without = sorted((row for row in rows if not row["to"]), key=itemgetter("why"))
        for why, group in groupby(without, key=itemgetter("why")):
            values = ((r["key"], None if why == "empty" else r["value"]) for r in group)
            keys = (key + f" {shown(value)}" * (value is not None) for key, value in values)
            lines.append(f"  {', '.join(keys)}: {why}")
    lines += ["", "its defaults, which differ from those here:"] * bool(data["defaults"])
    lines += [f"  {path} = {shown(value)}" for path, value in data["defaults"].items()]
    done = f"wrote {data['output']}; next: hetero check --config {data['output']}"
    return "\n".join([*lines, "", *data["notes"], done])


def read_recipe(file: Path) -> tuple[dict[str, Any], str]:
    """The keys in a YAML or JSON file, or in a text with a command line of TRL, and the program
    that the file is of. Raises UserError."""
    text = _content(file)
    if file.suffix in (".py", ".ipynb"):
        raise UserError(
            f"{file} is a program in Python, which is neither run nor read",
            hint="have it write what it gives to its trainer, as in"
            ' json.dump({"SFTConfig": args.to_dict(), "LoraConfig": peft_config.to_dict()}, file,'
            " default=list), and convert that file with --model and --data",
        )
    if file.suffix in _FILES:
        keys = _keys(text, file)
        return keys, program_of(keys, str(file))
    return _of_command(text, file), "TRL"


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from error


def _keys(text: str, file: Path) -> dict[str, Any]:
    try:
        keys = parse_object(text.encode(), name=str(file), foreign=True)
    except ConfigError as error:
        raise UserError(error.message) from None
    return _flat({str(key): part for key, part in keys.items()}, file)


def _flat(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The keys, with the fields taken out of a class's key, as in {"SFTConfig": {...}}."""
    found: dict[str, Any] = {}
    for key, inner in keys.items():
        inside = _CLASSES.fullmatch(key) if isinstance(inner, dict) else None
        if inside and inside["method"]:
            found["trl"] = inside["method"].lower()
        for name, part in _flat(inner, file).items() if inside else [(key, inner)]:
            if found.setdefault(name, part) != part:
                raise UserError(f"{file}: {name} is given twice, with two values; keep one")
    return found


def _of_command(text: str, file: Path) -> dict[str, Any]:
    """The options of `trl METHOD`, which override the keys in the file of --config."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"{file}: a quotation in the command line has no end") from error
    if words[:1] != ["trl"] or len(words) < 2 or any(map(_OF_A_SHELL.fullmatch, words)):
        raise UserError(
            f"{file} is neither YAML nor JSON, nor one command line of TRL",
            hint="a shell script is not read; write its command alone, with the values in place of"
            " variables: trl sft --model_name_or_path ...",
        )
    options = _options(words[2:], file)
    keys: dict[str, Any] = {"trl": words[1]}
    if (name := options.pop("config", None)) is not None:
        path = Path(str(name)) if Path(str(name)).exists() else file.parent / str(name)
        keys |= _keys(_content(path), path)
    return keys | options


def _options(words: Sequence[str], file: Path) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            raise UserError(f"{file}: {word} stands where an option of TRL is expected")
    made: dict[str, Any] = {}
    for name, values in found.items():
        if name.startswith("no_") and not values:
            made[name.removeprefix("no_")] = "false"
        else:
            made[name] = values[0] if len(values) == 1 else values or "true"
    return made
