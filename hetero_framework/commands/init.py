"""`hetero init`: writes a hetero_config.json from options, or by asking a few questions."""

from __future__ import annotations

import argparse
import glob
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from hetero_framework import registry
from hetero_framework.commands.options import (
    DEFAULT_CONFIG,
    IMPORT,
    flag,
    option,
    repeated,
    value,
    writes,
)
from hetero_framework.config import (
    AUTO,
    COORDINATOR_PORT,
    LIGHTHOUSE_PORT,
    WORKER_PORT,
    Config,
    ModelConfig,
    host_and_port,
    split_address,
)
from hetero_framework.config.objectives import needs_of, reads_text
from hetero_framework.core import addresses
from hetero_framework.core.files import refuse_output, write_json
from hetero_framework.errors import DataError, HeteroError, ModelError, UserError, attempt

EXAMPLES = """
    hetero init
    hetero init --non-interactive --model meta-llama/Llama-3.1-8B \\
        --worker 192.168.1.20:9999:cuda:0 --worker [fd00::2]:9999 --adapter qlora \\
        --data train.jsonl
    hetero init --non-interactive --model ./model --worker localhost:29501 --adapter none
    hetero init --non-interactive --model ./bert --worker box --data rows.jsonl \\
        --objective classification
    hetero init --island garage --lighthouse 192.168.1.10:29510
    hetero init --recipe dpo --data pairs.jsonl
    """
_HOST_PORT_DEVICE = "HOST[:PORT[:DEVICE]]"
OPTIONS = (
    flag("--non-interactive", "ask no questions"),
    IMPORT,
    value("--model", "NAME", "model directory or hub name"),
    repeated(
        "--worker",
        _HOST_PORT_DEVICE,
        "a worker (PORT -: it dials the coordinator); may be repeated",
        dest="workers",
    ),
    value("--coordinator", _HOST_PORT_DEVICE, "the coordinator (default: this machine)"),
    value("--layers", "N", "number of layers (default: the model's)", type=int),
    flag("--measure", "let the run measure the machines and plan for them; no even split"),
    option("--adapter", choices=("lora", "qlora", "none"), help="what to train (default: lora)"),
    value("--data", "FILE", "training data: file or dataset name"),
    value("--val-set-size", "N", "samples to hold out for evaluation, or their share", type=float),
    value(
        "--objective",
        "NAME",
        "what to learn: sft, dpo, classification, ... (default: what the data's fields tell)",
    ),
    value("--island", "NAME", "train together with other coordinators, as this one"),
    value(
        "--lighthouse",
        "HOST:PORT",
        "address where islands find each other (default: 127.0.0.1:29510)",
    ),
    value("--recipe", "NAME", "copy a commented configuration, or list all", nargs="?", const=""),
    *writes(f"default: {DEFAULT_CONFIG}, or hetero_config.yaml", default=DEFAULT_CONFIG),
)
ADAPTERS = ("lora", "qlora", "none")
_USUAL_DATA = "data/train.jsonl"
_ADDRESS = re.compile(r"(?:\[([^\]]*)\]|([^:\[]*))(?::([0-9]*|-)(?::(.*))?)?")
Say = Callable[[str], None]


def run(arguments: argparse.Namespace) -> None:
    if arguments.recipe is not None:
        registry.needed("recipes", "write", "--recipe")(arguments)
        return
    given = {**vars(arguments), "measure": arguments.measure or None}  # None, (): not given
    given["workers"] = tuple(arguments.workers)
    answers = Answers(**{f.name: given[f.name] for f in fields(Answers) if f.name in given})
    output = Path(arguments.output)
    if not arguments.non_interactive:
        config = run_wizard(answers, output, force=arguments.overwrite)
    else:
        config = write_config(answers, output, force=arguments.overwrite)
        objective = config.training.objective
        if arguments.objective is None and objective != "sft":
            print(f"training.objective is {objective}, as the fields of the data tell")
        if isinstance(error := attempt(lambda: checked_data(answers.data or "")), UserError):
            print(f"note: {error}")
    if config is None:
        print("nothing was changed")
        return
    print(f"wrote {output}; next: hetero check --config {output}")
    prepare_machines(config, output)


def prepare_machines(config: Config, output: Path) -> None:
    """Make the keys that a run on several machines needs, and print how to invite the others."""
    if "prepare" not in registry.installed("keys"):
        return
    from hetero_framework.security.keys import FOLDER, KeyDirectory

    keys = KeyDirectory(output.absolute().parent / FOLDER)
    made = registry.find("keys", "prepare")(config, keys)
    remote = [str(w.id) for w in config.planned_workers if not addresses.is_local_address(w.ip)]
    if made:
        print(f"made this cluster's authority and this machine's key: {keys.path}")
    if remote:
        print(f"invite the other machines: hetero invite {' '.join(remote)} --config {output}")
    island = config.setting("island")
    if island is not None and not addresses.is_loopback(island.lighthouse_address[0]):
        do = "have this island invited, on the lighthouse's machine: hetero invite --island"
        print(do, island.name)


@dataclass(frozen=True)
class Address:
    """The parts of HOST[:PORT[:DEVICE]]; an IPv6 address is in brackets if a port follows. The port
    "-" means that the worker dials the coordinator."""

    ip: str
    port: int | None = None
    device: str = "auto"
    dials: bool = False

    @property
    def entry(self) -> dict[str, Any]:
        """The machine's entry in the configuration; it has no port if `port` is None."""
        port = {} if self.port is None else {"port": self.port}
        return {"ip": self.ip, **port, "device": self.device}


@dataclass(frozen=True)
class Answers:
    """The answers given to `hetero init`; None and () stand for no answer."""

    model: str | None = None
    workers: Sequence[str] = ()
    coordinator: str | None = None
    device: str | None = None  # of the coordinator, unless `coordinator` is given
    layers: int | None = None
    adapter: str | None = None
    data: str | None = None
    val_set_size: float | None = None
    objective: str | None = None
    island: str | None = None
    lighthouse: str | None = None
    measure: bool | None = None  # leave the plan to the run, which measures the machines for it


def parse_address(text: str) -> Address:
    """Take HOST[:PORT[:DEVICE]] apart. Raises UserError."""
    text = text.strip()
    match = _ADDRESS.fullmatch(text)
    if addresses.parsed(text) is not None and ":" in text:
        address = Address(text)
    elif match is not None:
        bracketed, host, port, device = match.groups()
        number = int(port) if port and port != "-" else None
        address = Address(bracketed or host, number, device or "auto", dials=port == "-")
    else:
        raise UserError(
            f'"{text}" is not HOST, HOST:PORT or HOST:PORT:DEVICE',
            hint="for example 192.168.1.20:9999, [::1]:9999 or box:9999:cuda:0",
        )
    _validated({"workers": [{"id": 1, **address.entry}]}, text)
    return address


def split_layers(num_layers: int, machines: int) -> list[tuple[int, int]]:
    """Even ranges [start, end) of layers, the coordinator's first. The coordinator also holds the
    embedding, so workers get the remainder. Raises UserError if a worker would get no layer."""
    if num_layers < max(1, machines - 1):
        raise UserError(
            f"{num_layers} layers are too few for {machines - 1} workers", hint="name fewer workers"
        )
    return list(pairwise(num_layers * k // machines for k in range(machines + 1)))


def propose(
    answers: Answers, num_layers: int | None, *, hostname: str | None, own_address: str
) -> dict[str, Any]:
    """A complete configuration as JSON types; without `num_layers` the plan is left to the run.
    `hostname` and `own_address` are this machine's. This machine is the coordinator, unless the
    answers name another. Raises UserError."""
    workers = [parse_address(text) for text in answers.workers]
    coordinator = _coordinator(answers, workers, hostname, own_address)
    entries = _worker_entries(workers, coordinator)
    ranges = [] if num_layers is None else split_layers(num_layers, len(workers) + 1)
    plan: list[dict[str, Any]] = [
        {"id": position or "local", "start": start, "end": end}
        for position, (start, end) in enumerate(ranges)
    ]
    if plan:
        plan[-1]["is_last"] = True
    raw: dict[str, Any] = {"version": "1", "coordinator": coordinator, "workers": entries}
    raw["shard_plan"] = plan or AUTO
    adapter = answers.adapter or "lora"
    if answers.model:
        raw["model"] = {"name_or_path": answers.model}
        if adapter == "qlora":
            raw["model"].update(QLORA)
            for machine in (coordinator, *entries):
                if _lacks_four_bit(machine["device"].partition(":")[0]):
                    machine["quantization"] = "none"
    raw["adapter"] = None if adapter == "none" else dict(LORA)
    if answers.island is not None:
        where = answers.lighthouse or host_and_port("127.0.0.1", LIGHTHOUSE_PORT)
        raw["island"] = {"name": answers.island, "lighthouse": where}
    elif answers.lighthouse is not None:
        raise UserError("--lighthouse HOST:PORT goes with --island NAME")
    if all(entry.get("quantization") for entry in (coordinator, *entries)):
        raise UserError(
            "no machine of these has 4 bits, which qlora needs",
            hint="take --adapter lora, or add a machine with an NVIDIA, AMD, Intel or Apple GPU",
        )
    if answers.data:
        raw["data"] = {"train": answers.data, "max_length": 1024}
    raw["training"] = _training(answers.objective or "sft", len(entries), adapter)
    if answers.data and answers.val_set_size:
        raw["data"]["val_set_size"] = answers.val_set_size
        raw["training"]["eval_steps"] = 0.1  # of all steps
    return raw


def _worker_entries(
    workers: Sequence[Address], coordinator: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The entries of the workers, each with a port that is free on its machine."""
    taken = {(coordinator["ip"], coordinator["port"])}
    entries = []
    for number, worker in enumerate(workers, start=1):
        if not worker.dials:
            free = (p for p in count(WORKER_PORT) if (worker.ip, p) not in taken)
            worker = replace(worker, port=worker.port or next(free))
            taken.add((worker.ip, worker.port))
        entries.append({"id": number, **worker.entry})
    return entries


def _training(objective: str, workers: int, adapter: str) -> dict[str, Any]:
    facts = registry.facts("data", needs_of(objective).data)
    # The data's kind may give its own rates for all weights and for an adapter.
    full, of_adapter = facts.get("rates", (5e-5, 2e-4))
    return {
        "output_dir": "runs/default",
        **({"objective": objective} if objective != "sft" else {}),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(8, 2 * (workers + 1)),
        "learning_rate": full if adapter == "none" else of_adapter,
        "warmup_ratio": 0.03,
        "lr_scheduler_type": "cosine",
        "save_steps": 100,
        "save_total_limit": 3,
        "gradient_checkpointing": "auto",
        **facts.get("training", {}),
    }


# No dropout: PEFT refuses it on experts whose weights are one parameter.
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
QLORA = {"dtype": "bfloat16", "quantization": "nf4"}


def write_config(answers: Answers, output: Path, *, force: bool = False) -> Config:
    """Propose, validate and write a configuration; `force` replaces a file. Raises UserError."""
    refuse_output(output, overwrite=force)
    answers = settled(answers, output)
    if answers.coordinator is None and answers.adapter == "qlora":
        # "auto" may open a device without 4 bits.
        answers = replace(answers, device=_own_device(answers.device or "auto"))
    raw = propose(
        answers,
        None if answers.measure else _layers(answers, output),
        hostname=addresses.local_hostnames()[0],
        own_address=addresses.primary_address(),
    )
    config = Config.from_dict(raw, output.absolute().parent, name="the answers")
    write_json(output, raw)
    return config


def settled(answers: Answers, output: Path, **more: Any) -> Answers:
    """The answers and `more`, with the objective that the data tell, and with paths as the file
    `output` must state them. Raises UserError for a model or data that are not there."""
    if answers.model is not None:
        checked_model(answers.model)
    told = told_objectives(answers.data)
    if answers.objective is not None:
        _check_objective(answers.objective, *told)
    elif told[0]:
        more = {"objective": told[0][0], **more}
    model, data = (beside(path, output) for path in (answers.model, answers.data))
    return replace(answers, model=model, data=data, **more)


def told_objectives(data: str | None) -> tuple[list[str], str]:
    """The objectives that suit the first example of `data`, the likeliest first, and the names of
    the example's fields. Both are empty if the data are not in files on this machine. Raises
    DataError for data here that cannot be read."""
    if data is None:
        return [], ""
    from hetero_framework.data.kinds import objectives_of  # imports torch
    from hetero_framework.data.sources import find_sources, listed, read_file

    _data_folder(data)
    try:
        for source in find_sources(data, Path.cwd()):
            if source.is_file:
                first = next(read_file(source))
                return objectives_of(first), listed(first.fields)
    except DataError:
        if data and Path(data).expanduser().exists():  # others may come later
            raise
    return [], ""


def _check_objective(name: str, told: Sequence[str], listed: str) -> str:
    """Return `name`. Raises UserError if there is no such objective, or if it needs other data."""
    if not reads_text(needs_of(name).data):
        raise UserError(
            f"the objective {name} is for a data set of your own, in a file for --import",
            hint="begin with the example of it in docs/objectives.md",
        )
    if told and name not in told:
        raise UserError(
            f"the objective {name} is not for data with the fields {listed}",
            hint=f"these are for {', '.join(told)}; docs/objectives.md has the data of each",
        )
    return name


def _own_device(name: str) -> str:
    """The kind of this machine's device `name` if it cannot do 4 bits; else `name`."""
    from hetero_framework.core.devices import open_device

    with suppress(HeteroError):  # `hetero check` reports a missing one
        kind = open_device(name).kind
        return kind if _lacks_four_bit(kind) else name
    return name


def _lacks_four_bit(kind: str) -> bool:
    from hetero_framework.core.devices import without_four_bit  # imports torch

    return without_four_bit(kind) is not None


def run_wizard(
    answers: Answers,
    output: Path,
    *,
    force: bool = False,
    ask: Callable[[str], str] = lambda prompt: input(prompt),
    say: Say = print,
) -> Config | None:
    """Ask for the missing `answers`, and write the file unless another is to stay. A wrong answer
    is asked for again; an empty line takes the default. Raises UserError when the input ends."""

    questions = _Questions(answers, ask, say)
    try:
        say("A few questions; an empty line takes the value in [brackets].")
        if output.exists() and not force:
            reply = ask(f"{output} exists. Replace it? (yes/no) [no]: ").strip().lower()
            if reply not in ("yes", "y"):
                return None
        questions.ask_all()
    except (EOFError, KeyboardInterrupt) as error:
        say("")  # the reason is printed below the question
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(
            "the input ended before all questions were answered",
            hint="use --non-interactive with options; see `hetero init --help`",
        ) from None
    try:
        return write_config(questions.answers, output, force=True)
    except ModelError as error:
        say(f"The plan is left to the run, since the model cannot be read here: {error}")
        return write_config(replace(questions.answers, measure=True), output, force=True)


@dataclass
class _Questions:
    answers: Answers
    read: Callable[[str], str]
    say: Say

    def fill(
        self, name: str, question: str, default: str | None, check: Callable[[str], Any]
    ) -> None:
        """Ask for the answer `name`, if it is missing, until `check` takes it. An answer for which
        `check` raises ModelError is taken the second time."""
        doubted = None
        while getattr(self.answers, name) in (None, ()):
            prompt = f"{question} [{default}]: " if default is not None else f"{question}: "
            try:
                text = self.read(prompt).strip() or default
                if not text:
                    raise UserError("an answer is needed here")
                answer: Any = text if text == doubted else check(text)
                self.answers = replace(self.answers, **{name: answer})
            except UserError as error:
                self.say(f"  {error}")
                if isinstance(error, ModelError):
                    doubted = default = text
                    self.say(f"  Another name? An empty line keeps {text}")

    def ask_all(self) -> None:
        usual = _USUAL_DATA if Path(_USUAL_DATA).is_file() else None
        self.fill("data", "Training data: a file or a dataset name", usual, _readable_data)
        told, listed = told_objectives(self.answers.data)
        if listed:
            self.say(f"The data have the fields {listed}.")
        question = "Hold out for evaluation: a share such as 0.05, or a number of samples"
        self.fill("val_set_size", question, "0", _held_out)
        known = [n for n in registry.names("objectives") if reads_text(needs_of(n).data)]
        known = told or known
        suits = partial(_check_objective, told=told, listed=listed)
        self.fill("objective", f"Objective ({', '.join(known)})", [*told, "sft"][0], suits)
        self.fill("model", "Model: a directory or a name on the hub", None, self._readable)
        if self.answers.coordinator is None:
            question = "Device of this machine, the coordinator (auto, cpu, cuda:0, mps, ...)"
            self.fill("device", question, "auto", _device)
        question = f"Workers ({_HOST_PORT_DEVICE} of each, with spaces between), or none"
        self.fill("workers", question, f"127.0.0.1:{WORKER_PORT}", _workers)
        if self.answers.workers and sys.stdin.isatty():
            question = "Measure the machines when the run begins, and plan by that? (yes/no)"
            self.fill("measure", question, "no", _yes)
        question = "Train lora, qlora (4-bit base) or none (all weights)"
        self.fill("adapter", question, "lora", _one_of(*ADAPTERS))

    def _readable(self, text: str) -> str:
        """The name of a model. Raises ModelError if its configuration cannot be read here."""
        _model_config(checked_model(text), self.answers.objective, Path.cwd())
        return text


def checked_model(text: str) -> str:
    """The name of a model. Raises UserError for a directory that is not there."""
    if _is_path(text) and not Path(text).expanduser().is_dir():
        raise UserError(f"there is no directory {text}; a name on the hub is like ORG/NAME")
    return text


def checked_data(text: str) -> str:
    """The name of training data. Raises UserError for a path that is not there."""
    is_file = _is_path(text) or registry.has("files", Path(text.lower().removesuffix(".gz")).suffix)
    if is_file and not Path(text).expanduser().exists() and not glob.glob(text, recursive=True):
        raise UserError(f"there is no file {text}; a dataset's name on the hub is like ORG/NAME")
    _data_folder(text)
    return text


def _readable_data(text: str) -> str:
    told_objectives(checked_data(text))
    return text


def _data_folder(text: str) -> None:
    """Raise DataError for a folder here that holds no data."""
    if Path(text).expanduser().is_dir():
        from hetero_framework.data.sources import find_sources

        find_sources(text, Path.cwd())


def _is_path(text: str) -> bool:
    """Whether a name can only be a path here: names on the hub have at most one slash."""
    return text.startswith((".", "/", "~")) or "\\" in text or text.count("/") > 1


def _held_out(text: str) -> float:
    with suppress(ValueError):
        if (size := float(text)) >= 0 and (size < 1 or size.is_integer()):
            return size
    raise UserError(f'"{text}" is neither a share, such as 0.05, nor a number of samples')


def _workers(text: str) -> list[str]:
    workers = [] if text == "none" else text.split()
    for worker in workers:
        parse_address(worker)
    return workers


def _device(text: str) -> str:
    _validated({"coordinator": {"ip": "coordinator.invalid", "device": text}}, text)
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text.lower() not in words:
            raise UserError(f'"{text}" is not one of {", ".join(words)}')
        return text.lower()

    return check


def _yes(text: str) -> bool:
    return _one_of("yes", "y", "no", "n")(text).startswith("y")


def _coordinator(
    answers: Answers, workers: Sequence[Address], hostname: str | None, own_address: str
) -> dict[str, Any]:
    if answers.coordinator is not None:
        address = parse_address(answers.coordinator)
        return replace(address, port=address.port or COORDINATOR_PORT).entry
    others = [worker.ip for worker in workers]
    if answers.lighthouse is not None:  # other islands have to reach this coordinator
        others.append(_host(answers.lighthouse))
    ip = "127.0.0.1" if all(map(addresses.is_loopback, others)) else own_address
    entry = Address(ip, COORDINATOR_PORT, answers.device or "auto").entry
    return {"hostname": hostname, **entry} if hostname else entry


def _host(lighthouse: str) -> str:
    try:
        return split_address(lighthouse)[0]
    except ValueError as error:
        raise UserError(f"--lighthouse: {error}") from None


def _layers(answers: Answers, output: Path) -> int:
    """The number of layers, from the model's configuration; as given where that is not here."""
    given, model, folder = answers.layers, answers.model, output.absolute().parent
    if given is not None and given < 1:
        raise UserError(f"--layers {given}: a model has at least one layer")
    if given is not None and (model is None or not (folder / Path(model).expanduser()).exists()):
        return given
    if model is None:
        raise UserError(
            "the number of layers is not known", hint="give --model NAME, or --layers N"
        )
    from hetero_framework.models.cut.introspect import introspect

    found = introspect(_model_config(model, answers.objective, folder)).num_layers
    if given not in (None, found):
        raise UserError(f"--layers {given}: the model has {found}", hint="leave the option out")
    return found


def _model_config(name: str, objective: str | None, folder: Path) -> Any:
    from hetero_framework.models.files.source import ModelSource

    model = ModelConfig(name_or_path=name).for_objective(objective or "sft")
    return ModelSource(model, folder).config


def beside(path: str | None, output: Path) -> str | None:
    """A local path as the file `output` must state it: relative if beside it. Hub names stay."""
    if not path or not Path(path).expanduser().exists():  # "" would be this folder
        return path
    place, folder = Path(path).expanduser().resolve(), output.absolute().parent.resolve()
    is_inside = place.is_relative_to(folder)
    return place.relative_to(folder).as_posix() if is_inside else str(place)


def _validated(parts: dict[str, Any], text: str) -> None:
    """Check one answer with the schema, in an otherwise valid configuration."""
    raw = {"coordinator": {"ip": "coordinator.invalid"}, "shard_plan": AUTO, **parts}
    error = attempt(lambda: Config.from_dict(raw, name=f'"{text}"'))
    [part] = parts.values()
    device = (part[0] if isinstance(part, list) else part)["device"]
    if device != "auto" and not isinstance(error, UserError):
        from hetero_framework.core.devices import OUT_OF_TREE, list_devices  # imports torch

        known = ["cpu", "cuda", "rocm", "mps", "xpu", *OUT_OF_TREE]
        known += [device.kind for device in list_devices()]
        if device.partition(":")[0] not in known:
            raise UserError(f'"{text}": there is no kind of device {device!r}, as cpu or cuda:0 is')
    if isinstance(error, UserError):
        raise UserError(re.sub(r"(workers\[0\]|coordinator)\.", "", error.message))
