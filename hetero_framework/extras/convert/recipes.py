"""Reads recipes of axolotl, LLaMA-Factory and TRL: their files, and command lines of scripts, with
what launchers and the environment say of processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from hetero_framework.config.strict_json import parse_object
from hetero_framework.errors import ConfigError, UserError, in_words
from hetero_framework.extras.convert.convert import (
    BY_HAND,
    CHANGED,
    IDLE,
    ConvertedKey,
    marks,
    program_of,
)
from hetero_framework.extras.convert.scripts import UNKNOWN, ShellCommand, read_commands

# Names that stand around fields of classes.
_CLASSES = re.compile(
    "(sft|peft|lora|model)_config|(training_|model_|script_)?args|model_init_kwargs"
    "|(SFT|Lora|Model)Config|ScriptArguments|(?P<method>DPO|ORPO|CPO|KTO|Reward)Config"
)
_OF_SCRIPT = re.compile(r"(?:.*_)?(sft|dpo|orpo|cpo|kto|reward|grpo|ppo|rloo|gkd|prm)(?:_.*)?")
_TRAINERS = {"axolotl": "axolotl", **dict.fromkeys(("llamafactory-cli", "lmf"), "LLaMA-Factory")}
_SCRIPT = re.compile(r"(.*/)?\w[\w.-]*\.py|trl\.scripts\.\w+|axolotl\.cli\.train")
_ARGUMENT = re.compile(r"--\w|[^-].*\.(ya?ml|json)$|[\w.]+=")
_FILES = (".yaml", ".yml", ".json")
_PROCESSES = ("num_processes", "np", "nproc_per_node", "num_gpus", "nnodes", "num_nodes")
_LAUNCHING = (*_PROCESSES, "include", "hostfile", "config_file", "accelerate_config")
_LAUNCHERS = re.compile(r"accelerate|torchrun|deepspeed|mpirun|srun|torch\.distributed\.\w+")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_PREDEFINED = re.compile(r"(single|multi)_gpu|fsdp[12]|zero[123]")  # by TRL, for 8 processes
_IDLE = re.compile(
    r"set|echo|printf|mkdir|sleep|wait|date|pip3?|conda|source|module|ulimit|nvidia-smi|tee|exit"
    r"|trap|unset|hash|which|fi|done|for|case|esac|test|true|shift|elif|\W+"
)
_PYTHON = re.compile(r"^(from [\w.]+ )?import \w", re.MULTILINE)


@dataclass
class Recipe:
    """Keys of a program, in how many processes it ran (None: that is not told), and what became of
    the parts that are no keys."""

    keys: dict[str, Any]
    program: str
    processes: int | None = None
    rows: list[ConvertedKey] = field(default_factory=list)

    def say(self, key: str, value: Any, status: str, why: str) -> None:
        self.rows.append(ConvertedKey(key.replace(UNKNOWN, ""), value, status, why=why))


def read_recipe(file: Path) -> Recipe:
    """A YAML or JSON file, or a script with a command line. Raises UserError."""
    text = _text(file)
    is_script = file.suffix not in _FILES
    if file.suffix in (".py", ".ipynb") or (is_script and _PYTHON.search(text)):
        raise UserError(
            f"{file} is a program in Python, which is neither run nor read",
            hint="have it write what it gives to its trainer, as in"
            ' json.dump({"SFTConfig": args.to_dict(), "LoraConfig": peft_config.to_dict()}, file,'
            " default=list), and convert that file with --model and --data",
        )
    try:
        commands = read_commands(text) if is_script else []
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    if any(_program(command.words) for command in commands):
        return _of_script(commands, file)
    keys = _keys(text, file)
    recipe = Recipe(keys, program_of(keys, str(file)))
    recipe.processes = _processes(keys, {}, file.parent)
    return recipe


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from error


def _keys(text: str, file: Path) -> dict[str, Any]:
    try:
        keys = parse_object(text.encode(), name=str(file), foreign=True)
    except ConfigError as error:
        hint = "give a YAML or JSON file, or a script with: trl sft --model_name_or_path ..."
        raise UserError(error.message, hint=None if file.suffix in _FILES else hint) from None
    return _flat({str(key): part for key, part in keys.items()}, file)


def _flat(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Without the names of classes around fields, as in {"SFTConfig": {...}}."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        inside = _CLASSES.fullmatch(key) if isinstance(value, dict) else None
        if inside and inside["method"]:
            found["trl"] = inside["method"].lower()
        for name, part in _flat(value, file).items() if inside else [(key, value)]:
            if found.setdefault(name, part) != part:
                raise UserError(f"{file}: {name} is given twice, with two values; keep one")
    return found


def _program(words: list[str]) -> tuple[int, str, str] | None:
    """In a command that may train: where its arguments begin, whose program it is ("" is unknown),
    and its method or script."""
    for place, word in enumerate(words[:-1]):
        name, following = Path(word).name, words[place + 1]
        if name == "trl" and re.fullmatch("(?!env$|chat$|vllm)[a-z_]+", following):
            return place + 2, "TRL", following
        if name in _TRAINERS and following == "train":
            return place + 2, _TRAINERS[name], ""
        if _SCRIPT.fullmatch(word) and any(map(_ARGUMENT.match, words[place + 1 :])):
            return place + 1, "", name
    return None


def _of_script(commands: list[ShellCommand], file: Path) -> Recipe:
    """The first command that trains; the others are named."""
    read = {n: _of_command(c, file) for n, c in enumerate(commands) if _program(c.words)}
    known = {n: 2 if r.program else min(max(marks(r.keys).values()), 2) for n, r in read.items()}
    taken = max(read, key=lambda number: (known[number], -number))
    recipe = read[taken]
    recipe.program = recipe.program or program_of(recipe.keys, str(file))
    for number in read.keys() - {taken}:
        words = commands[number].words
        name = " ".join(words[: (_program(words) or (1,))[0]])
        recipe.say(name, None, BY_HAND, "another command: convert it from a script of its own")
    for name in dict.fromkeys(c.words[0] for n, c in enumerate(commands) if n not in read):
        why = "it is no training: run it yourself where it matters"
        why = "convert in the folder that the command runs in" if name == "cd" else why
        is_idle = _IDLE.fullmatch(name)
        recipe.say(name, None, *((IDLE, "it trains nothing") if is_idle else (BY_HAND, why)))
    return recipe


def _of_command(command: ShellCommand, file: Path) -> Recipe:
    start, program, name = _program(command.words) or (0, "", "")
    before, after = command.words[:start], command.words[start:]
    if "--" in after:  # what axolotl hands on to its launcher
        before, after = before + after[after.index("--") :], after[: after.index("--")]
    recipe = Recipe({}, program)
    options, others = _options(after, single=program == "axolotl")
    for word in [*others, *_listed(options.pop("config", []))]:
        key, equals, value = word.partition("=")
        path = Path(word) if Path(word).exists() else file.parent / word
        if equals:
            options = {key.lstrip("+"): value} | options
        elif Path(word).suffix in _FILES and UNKNOWN not in word:
            recipe.keys |= _keys(_text(path), path)
        else:
            recipe.say(word, None, BY_HAND, "what this is cannot be told from the script")
    for key, value in options.items():
        outer, _, inner = key.partition(".")
        if any(UNKNOWN in part for part in _listed(value)):
            shown = " ".join(_listed(value)).replace(UNKNOWN, "")
            recipe.say(key, shown, BY_HAND, "the script does not tell the value")
            recipe.keys.pop(key, None)
        else:
            inside = {**(recipe.keys.get(outer) or {}), inner: value} if inner else value
            recipe.keys[outer] = inside
    environment = {n: v for n, v in command.environment.items() if UNKNOWN not in v}
    recipe.keys |= {n: v for n, v in environment.items() if n == "WANDB_PROJECT"}
    _name_method(recipe, name)
    given = {**recipe.keys, **_options(before, single=True)[0]}
    given = {n: str(v).replace(UNKNOWN, "") for n, v in given.items() if n in _LAUNCHING}
    by_name = {Path(word).name for word in before if _LAUNCHERS.fullmatch(Path(word).name)}
    if by_name & {"torchrun", "torch.distributed.run", "torch.distributed.launch"}:
        given = {"nproc_per_node": "1"} | given
    count = recipe.processes = _processes(given, environment, file.parent)
    if count is not None:
        why = f"{count} processes, whose samples a step has; shard_plan spreads layers"
        recipe.say("launcher", given, CHANGED, why)
    elif by_name or "FORCE_TORCHRUN" in command.environment:
        why = "how many processes there were it does not tell: --world-size N"
        recipe.say("launcher", given, BY_HAND, why)
    return recipe


def _name_method(recipe: Recipe, name: str) -> None:
    """Take the method of TRL from the name of its command or script."""
    of_others = marks(recipe.keys)
    if recipe.program not in ("", "TRL") or of_others.pop("TRL") < max(of_others.values()):
        return
    script = _OF_SCRIPT.fullmatch(name.removesuffix(".py").rpartition(".")[2])
    method = name if recipe.program else script and script[1]
    if method not in (None, "sft"):
        recipe.keys["trl"] = method
    elif method is None:
        why = "its options are read as those of TRL's sft; what it sets itself is not known here"
        recipe.say(name, None, BY_HAND, why)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _options(words: list[str], *, single: bool) -> tuple[dict[str, Any], list[str]]:
    """Options of a command and its other words; with `single` an option has one value at most."""
    found: dict[str, list[str]] = {}
    others, name = list[str](), ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name and not (found[name] and (single or word.startswith(UNKNOWN))):
            found[name].append(word)
        else:
            others.append(word)
    made: dict[str, Any] = {}
    for name, values in found.items():
        if name.startswith("no_") and not values:
            made[name.removeprefix("no_")] = "false"
        else:
            made[name] = values[0] if len(values) == 1 else values or "true"
    return made, others


def _processes(
    given: Mapping[str, Any], environment: Mapping[str, str], folder: Path
) -> int | None:
    """How many processes the options of launchers and the environment say there were."""
    config = str(given.get("config_file") or given.get("accelerate_config") or "")
    path = Path(config) if Path(config).is_file() else folder / config
    if config and path.is_file():
        given = {"num_processes": _keys(_text(path), path).get("num_processes"), **given}
    elif _PREDEFINED.fullmatch(config):
        given = {"num_processes": 8, **given}
    visible = next((environment[n].count(",") + 1 for n in _VISIBLE if environment.get(n)), None)
    hosts = str(given.get("include", "")).split("@")
    if "include" in given:
        factors = [
            str(sum(h.count(",") + 1 for h in hosts) if all(":" in h for h in hosts) else "")
        ]
    elif total := [str(given[name]) for name in ("num_processes", "np") if name in given]:
        factors = total[:1]
    else:
        here = environment.get("NPROC_PER_NODE", visible), environment.get("NNODES", 1)
        per_node = given.get("nproc_per_node", given.get("num_gpus", here[0]))
        factors = [str(per_node), str(given.get("nnodes", given.get("num_nodes", here[1])))]
    known = all(re.fullmatch(r"[1-9]\d*", factor) for factor in factors)
    return prod(map(int, factors)) if known else None
