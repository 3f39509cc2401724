"""Configurations of axolotl, LLaMA-Factory and TRL, turned into settings of this project.

A key that the schema knows by its own name, or by a name after "Elsewhere", becomes that setting.
alias_trainers.json has the other keys, "shared" keys and each program's own. "keys" maps names
(expressions) to a setting, or to cases [value, status, settings, reason]: the first case that fits
counts. "idle" keys need no setting, "never" keys cannot be had. "defaults" are the program's own,
each under the key or setting (name, or name=value) that it needs. A key of "methods" tells the
method of a file that names none. In settings "$" is the value, "$," the list of its parts between
commas, "*" the key. In defaults "=name*2" is twice another setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hetero_framework.config import Config, TrainingConfig, aliases
from hetero_framework.config.composition import whole_schema
from hetero_framework.config.optimizers import optimizer_problems
from hetero_framework.config.problems import problems_of, shown
from hetero_framework.config.section import sections_of
from hetero_framework.config.strict_json import read_object
from hetero_framework.config.text_limits import text_problems
from hetero_framework.errors import UserError

PROGRAMS = ("axolotl", "LLaMA-Factory", "TRL")
TAKEN, CHANGED, IDLE, NEVER, BY_HAND, UNKNOWN = STATUSES = (
    *("taken", "changed", "no effect here", "cannot be had", "to do by hand", "unknown"),
)
_SCHEMA: type[Config] = whole_schema(Config)
_SECTIONS = {name: sections_of(_SCHEMA)[name] for name in ("adapter", "data", "training", "model")}
_NEEDED = {"model.name_or_path": "model", "data.train": "train.jsonl"}
_PATHS = (
    *("model.name_or_path", "model.tokenizer", "adapter.init_from"),
    *("data.train", "data.eval", "data.chat_template_path"),
)
_SECRET = re.compile(r".*(hub_token|api_key|secret|password|webhook\w*)")
# Settings in whose place another setting may stand.
_INSTEAD = {
    **{"training.warmup_ratio": "training.warmup_steps", "training.bf16": "training.fp16"},
    **{f"training.{name}_strategy": f"training.{name}_steps" for name in ("save", "eval")},
}
_FIRST = ("trl", "rl", "reward_model", "stage", "pref_loss", "loss_type", "dpo_loss_type")
_OF_LOSSES = ("training.loss_type", "training.loss_weights")
_LATE = ("training.load_best_model_at_end", *_OF_LOSSES)  # judged beside all other settings
_OF_EVALUATIONS = (
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("early_stopping_patience", "early_stopping_threshold"),
)
_LOADERS = ("json", "jsonl", "parquet", "text", "csv", "arrow")  # of `datasets`, beside data_files
_SETS = ("datasets", "test_datasets", "pretraining_dataset")
_NAMED_SETS = {"dataset": "train", "eval_dataset": "eval"}  # of LLaMA-Factory


@dataclass(frozen=True)
class ConvertedKey:
    """What became of one key: one of STATUSES, the settings that it went `to`, and why."""

    key: str
    value: Any
    status: str
    to: tuple[str, ...] = ()
    why: str = ""


@dataclass
class Conversion:
    """Converts the keys `given` in a program's file: to `settings` by path, and to `rows` that say
    what became of each key. `world_size` counts the other run's processes, each with micro-batches
    of its own; 0: the file says it. `settings` may begin with some that the file lacks."""

    program: str
    given: dict[str, Any]
    world_size: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[ConvertedKey] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told_processes = self.given.get("num_processes") or self.given.get("nproc_per_node") or 1
        self.world_size = self.world_size or int(told_processes)
        methods = _table(self.program).get("methods", {}).items()
        told = not methods or "trl" in self.given
        if not told and (named := [m for m, n in methods if {*n.split()} & {*self.given}]):
            self.given = {"trl": named[0], **self.given}
        rank = {key: number - len(_FIRST) for number, key in enumerate(_FIRST)}
        for key in sorted(self.given, key=lambda key: rank.get(key, 0)):
            self._take_key(key, self.given[key])
        if not told:
            why = "told by its keys; write training.objective if it is another one, such as orpo"
            self._change("training.objective", status=CHANGED, why=why)
        self._decide_adapter()
        self._fill_defaults()
        if (n := self.world_size) > 1:  # a step has the micro-batches of all processes
            path = "training.gradient_accumulation_steps"
            before = self.settings.get(path, 1)
            self.settings[path] = before * n
            self._change(path, status=CHANGED, why=f"{before} of each of {n} processes")
        self._settle()

    def sections(self, place: Callable[[str], str]) -> dict[str, Any]:
        """The sections model, adapter, data and training of the new file. `place` rewrites a path
        for that file."""
        made: dict[str, Any] = {name: {} for name in _SECTIONS}
        for path, value in self.settings.items():
            section, _, name = path.partition(".")
            if path in _PATHS:
                value = _placed(value, place)
            if name:
                made[section][name] = value
        return made if self.settings["adapter"] else {**made, "adapter": None}

    def _say(self, key: str, value: Any, status: str, why: str = "", *to: str) -> None:
        value = "(not shown)" if value and _SECRET.fullmatch(key) else value
        self.rows.append(ConvertedKey(key, value, status, to, why))

    def _take_key(self, key: str, value: Any) -> None:
        """Convert one key of the file, or the keys inside it."""
        if key in _SETS and value:
            entries = _entries(key, value)
            for number, entry in enumerate(entries):
                place = f"{key}[{number}]"
                for name, inner in entry.items():
                    rated = name == "type" and self._objective != "sft"
                    named = f"{'pairs' if rated else 'datasets'}.{name}"
                    self._take(named, inner, f"{place}.{name}")
            self._use_sets(key, entries, "eval" if key == "test_datasets" else "train")
            if len({str(entry.get("type")).partition(".")[0] for entry in entries}) > 1:
                why = "a run has sets of one format: write all rows as messages, or all as prompt"
                self._say(key, None, BY_HAND, f"{why} and completion")
        elif key in _NAMED_SETS and value and self.program == "LLaMA-Factory":
            names, to = _listed(value), f"data.{_NAMED_SETS[key]}"
            self.settings[to] = names[0] if len(names) == 1 else names
            why = (
                f"write the files or hub names that dataset_info.json gives for these into {to},"
                " and Alpaca's rows as messages, since the chat template writes them there"
            )
            self._say(key, value, BY_HAND, why, to)
        elif value and key in _containers(self.program):
            for name, inner in value.items():
                self._take(f"{key}.{name}", inner, f"{key}.{name}")
        else:
            self._take(key, value, key)

    def _take(self, name: str, value: Any, key: str) -> None:
        """Find out what becomes of `key`, which the table calls `name`."""
        if value is None or value in ("", [], {}):
            return self._say(key, value, TAKEN, "empty")
        if cases := next((c for n, c in _rules(self.program) if re.fullmatch(n, name)), None):
            return self._apply(name, value, key, cases)
        here = aliases.setting_called(_SCHEMA, "training", name) or ""
        if here.partition(".")[0] in _SECTIONS and "." in here:
            return self._set(key, value, {here: value})
        if any(aliases.is_harmless(_SCHEMA, section, name, value) for section in _SECTIONS):
            return self._say(key, value, TAKEN, "what happens anyway")
        for section in ("adapter", "data", "training"):
            if self.program != "axolotl" and name in _SECTIONS[section].model_fields:
                return self._set(key, value, {f"{section}.{name}": value})
        if words := aliases.own_name(_SCHEMA, "training", name):
            return self._say(key, value, BY_HAND, f"it is called {words} here")
        if why := aliases.refusal_of(_SCHEMA, "training", name):
            return self._say(key, value, NEVER, why)
        return self._say(key, value, UNKNOWN, f"no key of {self.program} that is known here")

    def _apply(self, name: str, value: Any, key: str, cases: list[Any]) -> None:
        text = value.strip() if isinstance(value, str) else json.dumps(value, default=str)
        for pattern, status, settings, why in cases:
            if match := re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
                if status == "stop":
                    text = f"{key}: {shown(value)} of {self.program} is not done here: {why}"
                    raise UserError(text)
                filled = self._fill(settings, value, match).items()
                made = {path.replace("*", name): part for path, part in filled}
                return self._set(key, value, made, status, why)
        return self._say(key, value, NEVER, "there is no such value here")

    def _fill(self, made: Any, value: Any, match: re.Match[str]) -> Any:
        """Resolve a table's entry to its value (the head of this module explains "$")."""
        if isinstance(made, dict):
            return {key: self._fill(part, value, match) for key, part in made.items()}
        if made == "per epoch":
            return 1 / (int(value) * float(self.given.get("num_epochs") or 1))
        if made == "per micro-batch":
            return max(1, int(value) // int(self.given.get("micro_batch_size") or 1))
        if made in ("$", "$,"):
            return value if made == "$" else _listed(value)
        return match.expand(made) if isinstance(made, str) else made

    def _set(
        self, key: str, value: Any, to: Mapping[str, Any], status: str = TAKEN, why: str = ""
    ) -> None:
        """Store the settings `to` that a key becomes. An invalid one makes the key NEVER."""
        for path, asked in to.items():
            old = self.settings.get(path)
            fitting, wrong = asked, ""
            if path not in _OF_LOSSES:
                fitting, wrong = _fit(path, asked, self._context(to))
            if wrong:
                return self._say(key, value, NEVER, wrong)
            if old == "all-linear":  # a union of both
                fitting, status, why = old, CHANGED, "all linear layers are named already"
            elif old not in (None, fitting) and path != "training.objective":
                status, why = CHANGED, f"in place of {shown(old)}, which another key says"
            self.settings[path] = fitting
        return self._say(key, value, status, why, *to)

    @property
    def _objective(self) -> str:
        return str(self.settings.get("training.objective", "sft"))

    def _context(self, to: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of training beside which the settings `to` of a key are checked."""
        objective = {**self.settings, **to}.get("training.objective", "sft")
        # Whether anything is evaluated is known only at the end.
        found: dict[str, Any] = {"eval_strategy": "steps", "objective": objective}
        if objective == "kto":
            found |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
        return found

    def _drop(self, path: str, why: str) -> None:
        """Take a setting back; its row says why."""
        self.defaults.pop(path, None)
        taken = self.settings.pop(path, None)
        self._change(path, status=TAKEN if taken is False else NEVER, to=(), why=why)

    def _change(self, path: str, **new: Any) -> None:
        """Change the rows of the keys that gave the setting at `path`."""
        self.rows = [replace(row, **new) if path in row.to else row for row in self.rows]

    def _decide_adapter(self) -> None:
        """Decide whether there is an adapter. Without one, drop the settings that need it."""
        named = {"r", "peft_type", "target_modules"} & self.given.keys()  # keys of PEFT's own class
        always = (made for needs, made in _table(self.program)["defaults"] if not needs)
        given = bool(named) or any(made.get("adapter") for made in always)
        if not self.settings.setdefault("adapter", given):
            for path in [path for path in self.settings if path.startswith("adapter.")]:
                self._drop(path, f"{self.program} does not use it without an adapter either")
            self._drop("model.quantization", "quantised weights are not trained without an adapter")

    def _fill_defaults(self) -> None:
        """Set the other program's defaults where they differ from the defaults here."""
        for needs, made in _table(self.program)["defaults"]:
            for path, value in made.items() if all(self._has(n) for n in needs.split()) else ():
                instead = self.settings.get(_INSTEAD.get(path, ""), False)
                if path in self.settings or instead is not False:
                    continue
                if isinstance(value, str) and value.startswith("="):
                    name, _, factor = value[1:].partition("*")
                    value = self.settings.get(name, own_default(name)) * int(factor or 1)
                if value != own_default(path):
                    self.settings[path] = self.defaults[path] = value

    def _has(self, need: str) -> bool:
        """Whether a key or setting is there: "name", "name=value", or one of several with "|"."""
        if "|" in need:
            return any(map(self._has, need.split("|")))
        name, _, value = need.partition("=")
        found = self.settings.get(name) or self.given.get(name)
        return found == value if value else bool(found)

    def _settle(self) -> None:
        """Leave out what contradicts another setting, and name what is missing."""
        has, objective = self.settings.get, self._objective
        transformers = self.program != "axolotl"  # axolotl evaluates by eval_strategy alone
        strategy = has("training.eval_strategy", "no" if transformers else "steps")
        if self.program == "TRL" and strategy != "no" and has("data.train"):
            self.settings.setdefault("data.eval", has("data.train"))
        no_data, none = not (has("data.eval") or has("data.val_set_size")), "no evaluation data"
        counted = int(has("training.max_steps", -1)) > 0
        streams = has("data.streaming") and counted
        idle, rated = no_data or strategy == "no", objective != "sft"
        by_weights = has("adapter.init_lora_weights") in ("pissa", "olora")
        quantised = by_weights and has("model.quantization")
        answers = "the loss of preferences covers answers"
        for path, wrong, why in (
            ("data.completion_only_loss", rated, answers),
            ("data.assistant_only_loss", rated, answers),
            ("training.rpo_alpha", rated and objective != "dpo", f"{objective} adds no such loss"),
            ("data.streaming", not counted, "max_steps is needed"),
            ("data.packing", streams, "streams are not packed"),
            ("data.eval_packing", no_data, none),
            ("data.eval_packing", not has("data.packing"), "training data are not packed"),
            ("data.val_set_size", has("data.eval") or streams, "data.eval is there, or a stream"),
            ("training.eval_strategy", no_data and strategy != "no", none),
            ("training.eval_on_start", idle and has("training.eval_on_start"), none),
            ("training.eval_steps", no_data or strategy != "steps", "nothing to evaluate"),
            *((f"training.{name}", idle, "nothing is evaluated") for name in _OF_EVALUATIONS),
            ("training.save_strategy", idle and has("training.save_strategy") == "best", none),
            ("training.warmup_ratio", has("training.warmup_steps"), "warmup_steps counts"),
            ("data.pad_to_multiple_of", has("data.padding_free"), "nothing is padded"),
            ("adapter.init_lora_weights", quantised, "it rewrites weights, which are quantised"),
        ):
            if wrong:
                self._drop(path, why)
        # What trainers of preferences apply without being told.
        drops = rated and str(self.given.get("disable_dropout", True)).lower() == "true"
        if drops and has(path := "adapter.lora_dropout"):
            self._force(path, 0.0, "dropout is off in this training")
        if objective == "kto":
            path = "training.train_sampling_strategy"
            self._force(path, "sequential", "KTO takes the order of the file")
        self._judge_late_settings()
        for path, name in _NEEDED.items():
            if path not in self.settings:
                self.settings[path] = name
                self._say(path, None, BY_HAND, f"the file names none: write it in {path}")

    def _judge_late_settings(self) -> None:
        paths = (path for path in self.settings if path.startswith("training."))
        context = {path[9:]: self.settings[path] for path in paths if path not in _LATE}
        for path in _LATE:
            if not self.settings.get(path):
                continue
            value, wrong = _fit(path, self.settings[path], context)
            if wrong:
                self._drop(path, wrong)
            else:
                self.settings[path] = context[path[9:]] = value

    def _force(self, path: str, value: Any, why: str) -> None:
        """Give a setting a value, whatever the file says."""
        self.settings[path] = value
        self._change(path, status=CHANGED, why=why)
        if not any(path in row.to for row in self.rows):
            self.defaults[path] = value

    def _use_sets(self, key: str, entries: list[dict[str, Any]], role: str) -> None:
        """Take sets of data, which share one split and one configuration."""
        found = (_listed(entry.get("data_files") or entry.get("path")) for entry in entries)
        names = [name for paths in found for name in paths]
        self.settings[f"data.{role}"] = names[0] if len(names) == 1 else names
        for number, entry in enumerate(entries):
            if entry.get("data_files") and entry.get("path") not in (None, *_LOADERS):
                why = "download these files, and write their names in data.train"
                self._say(f"{key}[{number}].data_files", entry["data_files"], BY_HAND, why)
        for name, path in {"split": f"data.{role}_split", "name": "data.dataset_config"}.items():
            values = [entry.get(name) for entry in entries]
            if any(value != values[0] for value in values):
                why = "the sets differ in it: make each a source of data.train with its own, or a"
                self._say(f"{key}.{name}", values, BY_HAND, f"{why} file of its own")
            elif values[0]:
                self.settings[path] = values[0]


@cache
def _tables() -> dict[str, Any]:
    return read_object(Path(__file__).with_name("alias_trainers.json"))


def _table(program: str) -> dict[str, Any]:
    table: dict[str, Any] = _tables()[program]
    return table


@cache
def _rules(program: str) -> list[tuple[str, list[Any]]]:
    """The rules of a program's table: expressions of names, each with its cases."""
    table, found = _table(program), list[tuple[str, list[Any]]]()
    for names, cases in (*table["keys"].items(), *_tables()["shared"].items()):
        named = [[".*", TAKEN, {cases: "$"}, ""]] if isinstance(cases, str) else cases
        found += [(name, named) for name in names.split()]
    for group, status in (("idle", IDLE), ("never", NEVER)):
        for why, names in table[group].items():
            found.append((names, [["false", TAKEN, {}, why], [".*", status, {}, why]]))
    return found


@cache
def _containers(program: str) -> frozenset[str]:
    """Keys that only hold other keys, which have rules or names here."""
    own = {names for names, _ in _rules(program)}
    names = own.union(*aliases.called(_SCHEMA).values())
    outer = {name.partition(".")[0] for name in names if re.match(r"\w+\.", name)}
    return frozenset(outer - own - _SECTIONS.keys())


def program_of(keys: Mapping[str, Any], name: str) -> str:
    """The program whose keys these are. Raises UserError where that cannot be told."""
    # How many of the keys that mark a program are here.
    found = {p: sum(mark in keys for mark in _table(p)["marks"].split()) for p in PROGRAMS}
    best = max(found, key=lambda program: found[program])
    if "shard_plan" in keys or not found[best]:
        hint = f"its keys are {', '.join(keys) or 'none'}"
        raise UserError(f"{name} is not of axolotl, LLaMA-Factory or TRL", hint=hint)
    return best


def own_default(path: str) -> Any:
    """The default of a setting here; None where it has none."""
    section, _, name = path.partition(".")
    info = _SECTIONS[section].model_fields[name] if name else None
    return info.get_default(call_default_factory=True) if info and not info.is_required() else None


def _fit(path: str, value: Any, context: Mapping[str, Any]) -> tuple[Any, str]:
    """The value that the setting at `path` takes beside the `context` of training, and why it is
    refused, or "". A text may stand for a number or a switch, as on a command line. A single value
    may stand for a list."""
    section, _, name = path.partition(".")
    if not name:
        return value, ""
    needed = {p.partition(".")[2]: v for p, v in _NEEDED.items() if p.startswith(f"{section}.")}
    needed |= context if section == "training" else {}
    refused: list[str] = []
    text, candidates = str(value), [value]
    with suppress(ValueError):
        candidates.append(json.loads(text.lower() if text.lower() in ("true", "false") else text))
    with suppress(ValueError, TypeError):
        candidates.append([json.loads(part) for part in value])
    for candidate in (*candidates, [value]):
        try:
            part = {**needed, name: candidate}
            _SECTIONS[section].model_validate_json(json.dumps(part, default=str))
        except ValidationError as error:
            details = error.errors(include_url=False)
            refused += [problem.text for problem in problems_of(details, _SECTIONS[section], part)]
            continue
        refused = [problem.text for problem in text_problems({section: {name: candidate}})]
        if path in ("training.optim", "training.lr_scheduler_type"):
            refused += map(str, optimizer_problems(TrainingConfig(**{name: candidate})))
        return candidate, " ".join(refused)
    return value, refused[0]


def _placed(value: Any, place: Callable[[str], str]) -> Any:
    """One path or several, which `place` rewrites for another file."""
    return [place(part) for part in value] if isinstance(value, list) else place(value)


def _entries(key: str, value: Any) -> list[dict[str, Any]]:
    """The sets under a key of axolotl or TRL, as objects; a set may be given as only a path."""
    plain = {"type": "pretrain"} if key == "pretraining_dataset" else {}
    entries = value if isinstance(value, list) else [value]
    return [{**plain, **(e if isinstance(e, dict) else {"path": e})} for e in entries]


def _listed(value: Any) -> list[Any]:
    """A list, or the parts of a text between commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return list(value or ())
