"""A run's output: its directories, files of an earlier run in them, and the results.

A run owns its `output_dir` and all that lies in it, and has its id from there (`.run`).
`checkpoint_dir` and `logging_dir` may be shared with other runs, so a run's own files there carry
that id: the file `.hetero-run` among checkpoints, the end of a TensorBoard file's name.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock, Timeout
from huggingface_hub import EvalResult
from transformers import AutoConfig, PreTrainedTokenizerBase

from hetero_framework import registry
from hetero_framework.cluster.run_id import RUN_FILE, run_id_of
from hetero_framework.config import RESULT_DIRS, Config, effects
from hetero_framework.config.section import ON_CARD
from hetero_framework.core.files import write_file
from hetero_framework.data.sources import find_sources
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.errors import (
    ConfigError,
    DataError,
    HeteroError,
    UserError,
    in_words,
    of_disk,
)
from hetero_framework.file_trust import not_through_links, other_writers, refuse_link
from hetero_framework.log import EVENTS_FILE, one_line
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.cut.family import as_saved, family_named, family_of
from hetero_framework.models.cut.tiny import stock_class
from hetero_framework.models.files.card import TAGS, base_facts, code, is_hub_name, model_card
from hetero_framework.models.files.export import (
    OutputDirectory,
    align_tokens,
    weights_beside,
    write_adapter,
    write_checkpoint,
)
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.files.weights import (
    SINGLE_FILE,
    Checkpoint,
    as_loaded,
    config_dtype,
    whole_model,
)
from hetero_framework.repository import CONFIG
from hetero_framework.trainer.checkpoint import CheckpointStore, durable_store
from hetero_framework.trainer.metrics import METRICS_FILE
from hetero_framework.trainer.read_metrics import loss_of, read_curves
from hetero_framework.trainer.setup import Prepared

_log = logging.getLogger(__name__)
OWNER_FILE = ".hetero-run"
HOLDER_FILE = ".lock.json"  # beside the lock: Windows lets nobody read a locked file
UNFINISHED_FILE = ".unfinished"
_MOST_BYTES = 1 << 16  # of what another run has said of itself
_RECORDS = (METRICS_FILE, EVENTS_FILE, *registry.names("records"))
_NO_LINKS = (".durable", ".lock", "logs", *registry.names("caches"), *_RECORDS)
_HINTS = {
    "training.output_dir": "choose another one: --output-dir DIR",
    "checkpoint_dir": "set checkpoint_dir to a directory that can be written, or to null",
    "training.logging_dir": "set it to a directory that can be written, or to null",
}


class RunDirectories:
    """The directories of one run. Inside `with` they are locked, and writing there works.

    Entering raises ConfigError, which names the setting of a directory that cannot be written or
    locked.
    """

    def __init__(self, config: Config, store: CheckpointStore) -> None:
        self._config = config
        self.store = store
        self._durable = durable_store(config)
        self._output = config.output_dir
        self._locks = contextlib.ExitStack()
        self.run_id = ""
        self._goes_on = False

    def __enter__(self) -> RunDirectories:
        places = {
            "training.output_dir": self._output,
            "checkpoint_dir": self._config.checkpoints,
            "training.logging_dir": self.tensorboard,
        }
        self._config.spare_base_model()
        pictures, logs = self._output.glob("architecture.*"), (self._output / "logs").glob("*")
        for written in (*(self._output / name for name in _NO_LINKS), *pictures, *logs):
            refuse_link(written)
        with contextlib.ExitStack() as locks:
            done: set[Path] = set()
            for setting, directory in places.items():
                if directory is None or directory.resolve() in done:
                    continue
                is_outside = directory == self._output or not self._is_inside(directory)
                if not (is_outside or directory.exists()):
                    continue
                done.add(directory.resolve())
                refuse_link(directory, except_own=True)
                _probe(setting, directory)
                if (others := other_writers(directory)) is not None:
                    text = "%s: %s may write into %s: what they put there is not all noticed"
                    _log.warning(text, setting, others, directory)
                # What lies in output_dir is locked with it, unless another run uses it, too.
                if is_outside or (directory / OWNER_FILE).exists():
                    locks.enter_context(_locked(setting, directory))
                if is_outside and directory != self._output:
                    for around in set(directory.resolve().parents) - done:
                        if (around / RUN_FILE).exists():  # the output_dir of another run
                            locks.enter_context(_locked(setting, around))
                            done.add(around)
            self.run_id = run_id_of(self._output)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.keep()
        self._locks.close()

    @property
    def tensorboard(self) -> Path | None:
        """The directory of TensorBoard's files, if any are wanted."""
        wanted = self._config.training.has_tensorboard
        return self._config.logging_dir if wanted else None

    @property
    def is_unfinished(self) -> bool:
        """Whether a run of this `output_dir` has begun and not finished."""
        return (self._output / UNFINISHED_FILE).exists()

    def at_end(self, do: Callable[[], object]) -> None:
        """Do something after the run's last event, while its directories are still locked."""
        self._locks.callback(do)

    def keep(self) -> None:
        """Lock and mark `output_dir` again if it was moved or deleted while the run goes on."""
        if self._goes_on and not (self._output / ".lock").exists():
            text = "%s was moved or deleted; what the run writes from now on is in a new one"
            _log.warning(text, self._output)
            with contextlib.suppress(HeteroError):
                self._locks.enter_context(_locked("training.output_dir", self._output))
            self.mark_unfinished()

    def mark_unfinished(self) -> None:
        """Mark the run, so that the same command continues it from now on."""
        self._goes_on = True
        with _tolerating(self._output):
            write_file(self._output / UNFINISHED_FILE, b"")

    def mark_finished(self) -> None:
        """Remove the mark, so that the next run here begins afresh."""
        self._goes_on = False
        with _tolerating(self._output):
            (self._output / UNFINISHED_FILE).unlink(missing_ok=True)

    def check_fresh(self) -> None:
        """Raise ConfigError if a fresh run would write among another run's checkpoints."""
        directory = self._config.checkpoints
        owner = _owner(directory)
        is_own = owner["run"] == self.run_id if owner else self._is_inside(directory)
        if self.store.paths() and not is_own:
            whose = "another run"
            if owner:
                whose = f"the run whose output_dir is {one_line(owner['output_dir'])}"
            raise ConfigError(
                f"checkpoint_dir: {directory} holds checkpoints of {whose}",
                hint="choose another checkpoint_dir or move them away; --resume continues that run",
            )

    def set_aside(self) -> None:
        """Move what an earlier run of this `output_dir` left into `previous-<n>`, then own
        `checkpoint_dir`. Files that runs of another `output_dir` left are not touched."""
        self.check_fresh()
        old = {path: Path("checkpoints", path.name) for path in self.store.paths()}
        old |= {path: Path("durable", path.name) for path in self._durable.paths()}
        old |= {path: Path("tensorboard", path.name) for path in self._events()}
        for name in (*_RECORDS, *RESULT_DIRS):
            if (path := self._output / name).exists() and not self._is_read(path):
                old[path] = Path(name)
        if old:
            text = "moved what an earlier run left (%s) to %s"
            kinds = dict.fromkeys(place.parts[0] for place in old.values())
            _log.info(text, ", ".join(kinds), self._move(old))
        self.own_checkpoints()

    def tidy(self) -> None:
        """Remove what interrupted writes of checkpoints left, and log it. If that fails, the run
        still starts, and the next checkpoint tries again."""
        try:
            self.store.clean()
        except (OSError, HeteroError) as error:
            _log.warning("what an interrupted write left stays: %s", error)

    def set_later_aside(self, step: int) -> None:
        """Set checkpoints after `step` aside, because the run may now go differently."""
        stores = {self.store: Path(), self._durable: Path("durable")}
        later = {
            store.root / f"step_{n}": place / f"step_{n}"
            for store, place in stores.items()
            for n in store.complete_steps()
            if n > step
        }
        if later:
            target = self._move(later)
            _log.info("moved the checkpoints after step %d to %s", step, target)

    def own_checkpoints(self) -> None:
        """Mark `checkpoint_dir` as this run's, if it is outside `output_dir` or has a mark."""
        directory = self._config.checkpoints
        if not self._is_inside(directory) or _owner(directory) is not None:
            owner = {"run": self.run_id, "output_dir": str(self._output)}
            write_file(directory / OWNER_FILE, json.dumps(owner).encode() + b"\n")

    def _events(self) -> Iterator[Path]:
        directory = self._config.logging_dir
        end = "" if self._is_inside(directory) else self.run_id
        yield from sorted(directory.glob(f"events.out.tfevents.*{end}"))

    def _is_read(self, result: Path) -> bool:
        """Whether this run begins with an earlier result, which then stays in its place."""
        config = self._config
        names = [config.adapter.init_from] if config.adapter is not None else []
        names += [config.model.tokenizer] if config.model is not None else []
        names += [config.data.chat_template_path] if config.data is not None else []
        return any(config.path(name).is_relative_to(result) for name in names if name is not None)

    def _is_inside(self, directory: Path) -> bool:
        return directory.resolve().is_relative_to(self._output.resolve())

    def _move(self, paths: Mapping[Path, Path]) -> Path:
        """Move each path to its place below a new `previous-<n>`, which is returned."""
        number = 1
        while (self._output / f"previous-{number}").exists():
            number += 1
        target = self._output / f"previous-{number}"
        try:
            for path, place in paths.items():
                (target / place).parent.mkdir(parents=True, exist_ok=True)
                # Not a rename: checkpoint_dir may be on another disk than output_dir.
                shutil.move(path, target / place)
        except OSError as error:
            raise of_disk(error, ConfigError)(
                f"cannot move what an earlier run left in {self._output} aside: {error.strerror}",
                hint="choose another training.output_dir",
            ) from error
        return target


@contextlib.contextmanager
def _tolerating(directory: Path) -> Iterator[None]:
    """Only warn if a mark cannot be written: that is no reason to end a run."""
    try:
        yield
    except OSError as error:
        _log.warning("cannot write into %s: %s", directory, error.strerror)


def _owner(directory: Path) -> dict[str, str] | None:
    """The run that owns the directory; None where it has no owner."""
    try:
        owner = json.loads((directory / OWNER_FILE).read_text(encoding="utf-8"))
        return {"run": str(owner["run"]), "output_dir": str(owner["output_dir"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {directory / OWNER_FILE}: {in_words(error)}",
            hint="delete it if this directory is this run's own, or choose another directory",
        ) from error


def _probe(setting: str, directory: Path) -> None:
    """Create, write, rename and delete a file there, as the run will."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hetero-probe-", dir=directory) as place:
            probe, renamed = Path(place, "probe"), Path(place, "renamed")
            probe.write_bytes(b"\0" * 512)
            os.replace(probe, renamed)
            os.unlink(renamed)
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        raise of_disk(error, ConfigError)(
            f"{setting}: cannot write into {directory}: "
            + ("it is a file" if is_file else str(error.strerror)),
            hint=_HINTS[setting],
        ) from error


@contextlib.contextmanager
def _locked(setting: str, directory: Path) -> Iterator[None]:
    """Lock a directory, since two runs must not write into it."""
    lock, holder = FileLock(directory / ".lock"), directory / HOLDER_FILE
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"{setting}: {_holder(holder)} is writing into {directory}",
            hint=f"wait for it, stop it, or choose another {setting}",
        ) from None
    except OSError as error:
        raise of_disk(error, ConfigError)(
            f"{setting}: cannot lock {directory}: {error.strerror}", hint=_HINTS[setting]
        ) from error
    try:
        started = psutil.Process().create_time()  # process numbers are reused one day
        about = {"process": os.getpid(), "started": started, "host": platform.node()}
        with contextlib.suppress(OSError):  # the lock holds without it
            about["lock"] = (directory / ".lock").stat().st_ino  # a copied folder has another one
            write_file(holder, json.dumps(about).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def _holder(file: Path) -> str:
    """The holder of a lock in words, as its file beside the lock says."""
    try:
        with open(file, "rb", opener=not_through_links) as kept:
            holder = json.loads(kept.read(_MOST_BYTES))
        return f"process {int(holder['process'])} on {one_line(str(holder['host']))}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "another run"


def export(prepared: Prepared, pipeline: Pipeline, step: int | None = None) -> Path:
    """Write the result that the stages hold, of this `step` (None: the last one). Returns its
    directory."""
    config, plan, directory = prepared.config, prepared.adapter_plan, prepared.config.result_dir
    output = OutputDirectory(directory, overwrite=True)
    tensors = (part.tensors for _, _, part in pipeline.export())
    write_result(output, config, plan, prepared.source, prepared.tokenizer, tensors, step)
    return directory


def write_result(
    output: OutputDirectory,
    config: Config,
    plan: AdapterPlan | None,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Iterable[Mapping[str, torch.Tensor]],
    step: int | None = None,
) -> None:
    """Write an adapter as PEFT does or, with `plan` None, a Hugging Face checkpoint. Raises an
    error that lists missing tensors. `step` None is the last one."""
    card = run_card(config, source, step)
    model_config, generation = copy.deepcopy((source.config, source.generation))
    told = config.data is not None and config.data.eos_token is not None
    if tokenizer is not None:
        align_tokens(model_config, generation, tokenizer, ends_as_told=told)
    if plan is None:
        beside = weights_beside(source)
        write_checkpoint(
            output, tensors, model_config, generation, tokenizer, beside=beside, card=card
        )
        return
    model = source.model
    base = None if model.name_or_path is None else source.place
    classifier = None if model.task == "causal-lm" else model_config
    write_adapter(output, tensors, plan, base, model.revision, tokenizer, card, classifier)


def run_card(config: Config, source: ModelSource, step: int | None = None) -> str:
    """The card of the result after `step`; None: at the end of the run."""
    data = config.data
    sets = data.eval_sets if data is not None else {}
    parts = data.parts if data is not None else []
    trained = [name for part in parts for name in _hub_names(config, part.paths)]
    tested = {name: _hub_names(config, spec) for name, spec in sets.items()}
    last = _last_figures(config, step)
    figures = [
        f"{name.replace('_', ' ')} {value:.4g} (step {at})" for name, (at, value) in last.items()
    ]
    results = [
        EvalResult(TAGS[source.model.task], names[0], names[0], "loss", last[key][1])
        for name, names in tested.items()
        if names and (key := loss_of(name)) in last
    ]
    of_texts = config.training.reads_text
    told = effects.marked(ON_CARD, type(config))
    settings = [
        f"{name}: {code(json.dumps(value))}"
        for name, value in effects.flat(config.to_dict()).items()
        if name in told and value is not None and (of_texts or not name.startswith("data."))
    ]
    return model_card(
        base_facts(source),
        source.config,
        adapter=config.adapter is not None,
        lists={
            "## Training data": trained or ["files that are not on the hub"],
            "## Training procedure": settings,
            "### Plan": [
                f"stage {stage.index}: {config.contents(stage)}" for stage in config.plan.stages
            ],
            "### Last figures": figures or ["not kept with this result"],
        },
        datasets=list(dict.fromkeys([*trained, *chain(*tested.values())])),
        results=results,
    )


def _last_figures(config: Config, step: int | None) -> dict[str, tuple[int, float]]:
    """The steps and values of the last losses up to `step`, where they are known and finite."""
    try:
        curves = read_curves(config.output_dir)
    except UserError:  # the metrics are elsewhere, or lost
        return {}
    last = {}
    for name in (key for key in curves if key == "loss" or key.startswith("eval_")):
        for at, value in zip(*curves[name], strict=True):
            if step is None or at <= step:
                last[name] = (at, value)
    return {name: point for name, point in last.items() if math.isfinite(point[1])}


def _hub_names(config: Config, spec: str | tuple[str, ...]) -> list[str]:
    """The data sets of the hub among these sources. Empty if the configuration's folder is on
    another machine, since a file cannot be told from a name on the hub then."""
    if not config.training.reads_text or not config.base_dir.is_dir():
        return []
    try:
        sources = find_sources(spec, config.base_dir)
    except DataError:  # a file that is no longer here
        return []
    return [source.name for source in sources if source.kind == "hub" and is_hub_name(source.name)]


def what_next(prepared: Prepared, files: Mapping[str, Path]) -> dict[str, str]:
    """Next steps for a run's results: a label, and a command or a line of Python."""
    config = prepared.config
    assert config.model is not None
    result, output = typed(config.result_dir), typed(config.output_dir)
    load = f"{stock_class(as_saved(prepared.model_config)).__name__}.from_pretrained"
    steps = {}
    family = family_of(prepared.model_config)
    if family is not None and (line := family.loading(Path(result, SINGLE_FILE))) is not None:
        steps["to load it"] = line
    elif prepared.adapter_plan is None:
        steps["to load it"] = f"{load}({str(result)!r})"
    elif (base := config.model.name_or_path) is not None:
        place = config.path(base)
        base = str(typed(place)) if place.is_dir() else base
        labels = "" if config.model.task == "causal-lm" else f", config={str(result / CONFIG)!r}"
        model = f"{load}({base!r}{labels})"
        steps["to load it"] = f"PeftModel.from_pretrained({model}, {str(result)!r})"
        if registry.has("commands", "merge"):
            merged = ("--adapter", result, "--model", base, "--output", output / "merged")
            steps["to merge it"] = command("hetero", "merge", *merged)
    if not registry.has("commands", "export"):
        return steps
    if (saved := files.get("checkpoints")) is not None and len(list(saved.glob("step_*"))) > 1:
        step = ("--checkpoint", typed(saved) / "step_N", "--output", output / "step_N")
        steps["an earlier step"] = command("hetero", "export", *step)
    return steps


def load_result(files: Mapping[str, Path], **settings: Any) -> Any:
    """The model of a finished run, loaded by its class's `from_pretrained` or by its family."""
    if (adapter := files.get("adapter")) is not None:
        from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel

        about = PeftConfig.from_pretrained(str(adapter))
        source, revision = str(about.base_model_name_or_path), about.revision or "main"
        checkpoint = Checkpoint(source, revision)
        is_alone = not (adapter / CONFIG).exists()
        if is_alone and not checkpoint.is_stored_otherwise:
            return AutoPeftModelForCausalLM.from_pretrained(adapter, **settings)
        named = (source, revision) if is_alone else (str(adapter), "main")
        config = AutoConfig.from_pretrained(named[0], revision=named[1])
        if checkpoint.is_stored_otherwise:
            as_loaded(config)
            dtype = settings.pop("dtype", "auto")
            if isinstance(dtype, str):
                dtype = config_dtype(config) if dtype == "auto" else getattr(torch, dtype)
            base = whole_model(stock_class(config), config, checkpoint, dtype, **settings)
        else:
            settings = {"revision": revision, "config": config, **settings}
            base = stock_class(config).from_pretrained(source, **settings)
        return PeftModel.from_pretrained(base, adapter)
    raw = json.loads((files["model"] / CONFIG).read_text("utf-8"))
    if (family := family_named(raw["model_type"])) is not None:
        return family.load(raw, files["model"])
    config = AutoConfig.from_pretrained(files["model"])
    return stock_class(config).from_pretrained(files["model"], **settings)


def command(*words: object) -> str:
    """A command line as typed in this system's shell."""
    line = list(map(str, words))
    return subprocess.list2cmdline(line) if os.name == "nt" else shlex.join(line)


def typed(path: Path) -> Path:
    """`path` relative to the current directory, if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
