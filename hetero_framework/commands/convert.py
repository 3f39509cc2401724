"""`hetero convert`: makes a configuration from one of axolotl, LLaMA-Factory or TRL."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from itertools import groupby, islice
from pathlib import Path
from string import Template
from typing import Any

from hetero_framework.commands.init import Answers, beside, prepare_machines, propose
from hetero_framework.commands.options import DEFAULT_CONFIG, JSON, at_least, flag, option, repeated
from hetero_framework.commands.options import report as print_report
from hetero_framework.config import Config
from hetero_framework.config.convert import STATUSES, Conversion, as_messages, program_of
from hetero_framework.config.problems import shown
from hetero_framework.config.strict_json import parse_object
from hetero_framework.core import addresses
from hetero_framework.core.files import write_file
from hetero_framework.errors import ConfigError, UserError

EXAMPLES = """
    hetero convert qlora.yml
    hetero convert sft.sh --worker 192.168.1.20 --worker 192.168.1.30:9999:mps --output cluster.json
    hetero convert llama3_lora_sft.yaml --world-size 4
    hetero convert sft_config.json --model Qwen/Qwen2.5-0.5B --data train.jsonl
    """
_HOST = "HOST[:PORT[:DEVICE]]"
_OUTPUT = f"default: {DEFAULT_CONFIG}"
_WORLD_SIZE = "processes of the other run: a step had the samples of all"
OPTIONS = (
    option("file", metavar="FILE", help="a YAML or JSON file, or a script with a command line"),
    option("-o", "--output", default=DEFAULT_CONFIG, metavar="FILE", help=_OUTPUT),
    option("--model", metavar="NAME", help="model, where FILE names none"),
    option("--data", metavar="FILE", help="training data, where FILE names none"),
    option("--world-size", type=at_least(1), metavar="N", help=_WORLD_SIZE),
    repeated("--worker", _HOST, "a worker, as in hetero init; may be repeated", dest="workers"),
    option("--coordinator", metavar=_HOST, help="the coordinator (default: this machine)"),
    flag("--force", "replace an existing file"),
    JSON,
)
# Names that stand around fields of classes.
_CLASSES = re.compile(
    "((sft|peft|lora|model)_config|(training_|model_|script_)?args|model_init_kwargs"
    "|SFTConfig|LoraConfig|ModelConfig|ScriptArguments|(DPO|ORPO|CPO|KTO|Reward)Config)"
)
_METHOD = re.compile("dpo|orpo|cpo|kto|reward", re.IGNORECASE)
_ASSIGNED = re.compile(r"\s*(?:export\s+)?(\w+)=(\S*|\"[^\"]*\"|'[^']*')\s*")
_COMMAND = re.compile(r"^[^#\n]*(\btrl\s+\w+|\.py)\b.*\s--\w", re.MULTILINE)
_REDIRECTED = re.compile(r"\s\d>(&\d|\S+)")
_PROCESSES = ("num_processes", "nproc_per_node")


def run(arguments: argparse.Namespace) -> int:
    file, output = Path(arguments.file), Path(arguments.output)
    if output.exists() and not arguments.force:
        raise UserError(f"{output} exists already", hint="replace it with --force, or use --output")
    made = _converted(file, arguments)
    _write_rows(made)
    raw = _whole_file(made, arguments)
    config = Config.from_dict(raw, output.absolute().parent, name=f"what {file} becomes")
    write_file(output, json.dumps(raw, indent=2, ensure_ascii=False).encode() + b"\n")
    data = {
        "program": made.program,
        "output": str(output),
        "keys": [{**vars(row), "to": {p: made.settings[p] for p in row.to}} for row in made.rows],
        "defaults": made.defaults,
        "notes": list(_notes(config, made.world_size)),
    }
    print_report(arguments, data, _text)
    if config.workers:
        with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            prepare_machines(config, output)
    return 0


def _converted(file: Path, arguments: argparse.Namespace) -> Conversion:
    keys = read(file)
    program = program_of(keys, str(file))
    processes = next((keys[name] for name in _PROCESSES if name in keys), 1)
    named = {"model.name_or_path": arguments.model, "data.train": arguments.data}
    given = {name: value for name, value in named.items() if value}
    folder, output = file.absolute().parent, Path(arguments.output).absolute()
    try:
        world_size = arguments.world_size or int(processes)
        return Conversion(program, keys, folder, output, world_size, given)
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"{file} has a value of another kind than {program} takes: {error}"
        raise UserError(problem, hint="--debug shows where") from error


def _whole_file(made: Conversion, arguments: argparse.Namespace) -> dict[str, Any]:
    """The converted sections with the machines of the options; the plan is left to the run."""
    sections = made.sections(lambda text: str(beside(text, made.output)))
    model = sections["model"]
    adapter = "qlora" if model.get("quantization") else "lora"
    answers = Answers(
        model["name_or_path"], arguments.workers, arguments.coordinator, adapter=adapter
    )
    hostname, own = addresses.local_hostnames()[0], addresses.primary_address()
    return {**propose(answers, None, hostname=hostname, own_address=own), **sections}


def _write_rows(made: Conversion) -> None:
    from hetero_framework.data.sources import open_source, read_file

    for file in made.rewrites:
        rows = islice(read_file(open_source(str(file.source), file.source)), file.limit)
        lines = (row.fields for row in rows)
        if file.entry is not None:
            lines = (as_messages(line, file.entry) for line in lines)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_file(file.target, text.encode())


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
            to = (p + f" = {shown(v)}" * (status == "changed") for p, v in row["to"].items())
            why = f": {row['why']}" if row["why"] else ""
            lines.append(f"  {row['key']} {shown(row['value'])} -> {', '.join(to)}{why}")
        without = sorted((row for row in rows if not row["to"]), key=lambda row: row["why"])
        for why, group in groupby(without, key=lambda row: row["why"]):
            keys = [r["key"] + f" {shown(r['value'])}" * (why != "empty") for r in group]
            lines.append(f"  {', '.join(keys)}: {why}")
    lines += ["", "its defaults, which differ from those here:"] * bool(data["defaults"])
    lines += [f"  {path} = {shown(value)}" for path, value in data["defaults"].items()]
    done = f"wrote {data['output']}; next: hetero check --config {data['output']}"
    return "\n".join([*lines, "", *data["notes"], done])


def read(file: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file, or the options of a command line. Raises UserError."""
    try:
        text = file.read_text(encoding="utf-8-sig").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if file.suffix not in (".yaml", ".yml", ".json") and _COMMAND.search(text):
        return _read_command(text, file)
    try:
        keys = parse_object(text.encode(), name=str(file), foreign=True)
    except ConfigError as error:
        hint = "give a YAML or JSON file, or a script with: trl sft --model_name_or_path ..."
        raise UserError(error.message, hint=hint) from None
    return _flat({str(key): part for key, part in keys.items()}, file)


def _flat(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Without the names of classes around fields, as in {"SFTConfig": {...}}."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        inside = _CLASSES.fullmatch(key) and isinstance(value, dict)
        if inside and (method := _METHOD.match(key)):
            found["trl"] = method[0].lower()
        for name, part in _flat(value, file).items() if inside else [(key, value)]:
            if found.setdefault(name, part) != part:
                raise UserError(f"{file}: {name} is given twice, with two values; keep one")
    return found


def _read_command(text: str, file: Path) -> dict[str, Any]:
    """The options of the first command that trains, with the script's own variables put in."""
    variables: dict[str, str] = {}
    for line in text.splitlines():
        if assigned := _ASSIGNED.fullmatch(line):
            variables[assigned[1]] = assigned[2].strip("\"'")
        elif _COMMAND.match(line):
            try:
                lexer = shlex.shlex(_REDIRECTED.sub(" ", line), posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                words = list(lexer)
            except ValueError as error:
                raise UserError(f"{file}: {error}: {line.strip()}") from error
            return _options([Template(word).safe_substitute(variables) for word in words], file)
    raise UserError(f"{file} has no command that trains")


def _options(words: list[str], file: Path) -> dict[str, Any]:
    """The options of a command up to its end; those in front of the program are the launcher's."""
    end = next((k for k, word in enumerate(words) if set(word) <= set("|&;<>()")), len(words))
    program = next(k for k, word in enumerate(words) if word == "trl" or word.endswith(".py"))
    starts = [k for k, word in enumerate(words[:end]) if re.match(r"--\w", word)]
    found: dict[str, Any] = {}
    method = words[program + 1] if words[program] == "trl" else Path(words[program]).stem
    if method != "sft" and (words[program] == "trl" or _METHOD.fullmatch(method)):
        found["trl"] = method
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        name, equals, value = words[start][2:].partition("=")
        values = [value] if equals else words[start + 1 : stop]
        name = name.replace("-", "_")
        if start < program:
            values = values[:1]
            name = name if name in _PROCESSES else f"launcher.{name}"
        if name == "config" and values:
            path = Path(values[0])
            found = read(path if path.exists() else file.parent / path) | found
        elif name.startswith("no_") and not values:
            found[name.removeprefix("no_")] = "false"
        else:
            found[name] = values[0] if len(values) == 1 else values or "true"
    return found
