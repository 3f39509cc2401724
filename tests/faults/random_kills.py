"""One run whose processes are killed at random moments, and the same run undisturbed.

    python -m tests.faults.random_kills KIND DIRECTORY SEED...

The command is the user's, `hetero train`, which starts its worker itself and is given again when it
was killed. Who is killed, after which step and how long after it follows from the seed; the moment
within a step does not. Some kills come while the run begins or recovers, some after its last step.
Prints a JSON object for each seed: what the undisturbed run has otherwise, and who was killed after
which step.

"Otherwise" covers all that a run leaves and that does not tell of time: weights and optimizer of
every checkpoint that is left, the result, metrics.jsonl, log_history.jsonl, trainer_state.json,
samples.jsonl, and what TensorBoard has been told (a kill may cost the last points).
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hetero_framework.trainer.checkpoint import CheckpointStore
from tests.extras.classification.test_classification_runs import KINDS as CLASSES
from tests.extras.classification.test_classification_runs import save_rows
from tests.extras.preferences.test_preference_runs import KTO, save_pairs, save_ratings
from tests.faults.programs import last_step
from tests.faults.soak import Command
from tests.integration.test_parity import LORA
from tests.samples import machines_here, save_llama, save_texts

STEPS = 16
KILLS = 7
SLEEP_S = 0.04  # in each forward and backward: a step takes its time without the CPU
SILENT_S = 300.0
POLL_S = 0.01
_STARTING_S, _RECOVERING_S, _IN_STEP_S = 12.0, 4.0, 0.4
_OF_TIME = ("seconds", "runtime", "per_second", "stages", "remote_run")

Kill = tuple[int, float, str]
"""After this step, this much later: who."""

CALLBACKS = """
import numpy
from transformers import TrainerCallback

class Ask(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            control.should_evaluate = control.should_save = True

def compute_metrics(prediction):
    known = prediction.label_ids != -100
    return {"hits": float((prediction.predictions == prediction.label_ids)[known].mean())}

callbacks = [Ask()]
"""
EVERYTHING = {
    **{"load_best_model_at_end": True, "metric_for_best_model": "a_loss", "save_total_limit": 2},
    **{"early_stopping_patience": 4, "token_metrics": True, "report_to": ["tensorboard"]},
    **{"sample_prompts": ["the model trains", "a"], "sample_steps": 3, "sample_max_new_tokens": 5},
    **{"sample_temperature": 0.8, "logging_steps": 3, "visualize": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo"},
    "dpo in each step": {"objective": "dpo", "precompute_ref_log_probs": False},
    "kto": {**KTO, "objective": "kto"},
    "reward": {"objective": "reward"},
    "classification": {"objective": "classification"},
    "everything": EVERYTHING,
}


def schedule(kind: str, seed: int) -> list[Kill]:
    """By step. The first ones may come before the first step, the last ones after the last."""
    dice = random.Random(f"{kind} {seed}")
    kills = []
    for step in sorted(dice.choices(range(STEPS + 1), k=KILLS)):
        soon = dice.random() < 0.7
        most = _STARTING_S if not step else _IN_STEP_S if soon else _RECOVERING_S
        later = dice.uniform(0, most)
        kills.append((step, later, dice.choice(("coordinator", "worker", "worker", "both"))))
    return kills


def configuration(at: Path, kind: str, name: str) -> Path:
    training = {
        **{"output_dir": str(at / name), "max_steps": STEPS, "num_train_epochs": 100},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        **{"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 4, "logging_steps": 1},
        **{"eval_strategy": "steps", "eval_steps": 4, "report_to": "none", "visualize": False},
        **KINDS[kind],
    }
    raw = {
        **machines_here(("local", 2), (1, 4), num_threads=1),
        "model": {"name_or_path": str(at / "llama")},
        "data": {**data(at, training.get("objective", "sft")), "max_length": 40},
        "adapter": LORA,
        "training": training,
    }
    file = at / f"{name}.json"
    file.write_text(json.dumps(raw))
    return file


def data(at: Path, objective: str) -> dict[str, Any]:
    if objective == "sft":
        sets = {name: str(save_texts(at / f"{name}.jsonl", 5, seed=ord(name))) for name in "ab"}
        return {"train": str(save_texts(at / "texts.jsonl", 40)), "eval": sets}
    if objective == "kto":
        rows = save_ratings(at / "rows.jsonl")
    elif objective == "classification":
        rows = save_rows(at / "rows.jsonl", CLASSES["classes"][0])
    else:
        rows = save_pairs(at / "rows.jsonl")
    return {"train": str(rows), "eval": str(rows)}


def tells_of_time(name: str) -> bool:
    return name.endswith("_s") or any(part in name for part in _OF_TIME)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        names = [name for name in value if not tells_of_time(name)]
        return {name: without_times(value[name]) for name in names}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def found(output: Path) -> dict[str, Any]:
    """The records and weights that a run has left, by part."""
    parts: dict[str, Any] = {}
    for name in ("metrics.jsonl", "log_history.jsonl", "samples.jsonl"):
        lines = (output / name).read_text().splitlines() if (output / name).exists() else []
        parts[name] = [without_times(json.loads(line)) for line in lines]
    for file in [*output.glob("trainer_state.json"), *output.glob("checkpoints/*/trainer_*.json")]:
        state = without_times(json.loads(file.read_text()))
        if state.get("best_model_checkpoint"):
            state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
        parts[str(file.relative_to(output))] = state
    for file in [*output.glob("adapter/*.safetensors"), *output.glob("model/*.safetensors")]:
        parts[str(file.relative_to(output))] = file.read_bytes()
    store = CheckpointStore(output / "checkpoints")
    for step in store.complete_steps():
        reader = store.open(step)
        parts[f"checkpoint {step}"] = [
            (name, tensor.tolist()) for name, tensor in reader.read(reader.names())
        ]
    parts["tensorboard"] = scalars(output)
    return parts


def scalars(output: Path) -> set[tuple[str, int, float]]:
    """A step that is repeated writes its points again."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return {
        (value.tag, event.step, value.tensor.float_val[0])
        for file in output.rglob("events.out.tfevents*")
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tensor.float_val and not tells_of_time(value.tag)
    }


def stand_still(seconds: float) -> None:
    """Let the fault last for this time."""
    time.sleep(seconds)


def fill(ballast: Path) -> None:
    """Fill the disk to its last byte."""
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    time.sleep(POLL_S)


class Victims:
    """The disturbed run's processes."""

    def __init__(self, train: Command, output: Path) -> None:
        self.train = train
        self.output = output
        self._metrics = output / "metrics.jsonl"

    def step(self) -> int:
        """The last step that was written down."""
        return last_step(self._metrics)

    def kill(self, who: str) -> list[str]:
        """Those of them that were there."""
        there = [("worker", child) for child in self.workers()] * (who != "coordinator")
        if who != "worker":
            there.append(("coordinator", psutil.Process(self.train.process.pid)))
        killed = []
        for name, process in there:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(name)
        if "coordinator" in killed:
            self.train.process.wait()
        return killed

    def workers(self) -> Iterator[psutil.Process]:
        for child in self.train.children():
            with suppress(psutil.Error):
                if "--worker-id" in child.cmdline():
                    yield child

    def until(self, moment: float, step: int) -> bool:
        """Wait for the step and then until `moment` after it; False when the run is over."""
        since, last, reached = time.monotonic(), -1, math.inf
        while not self.train.is_over():
            now = time.monotonic()
            if self.step() != last:
                since, last = now, self.step()
            if last >= step:
                reached = min(reached, now)
            if now - reached >= moment:
                return True
            assert now - since < SILENT_S, f"nothing after step {last}:\n{self.train.said()}"
            time.sleep(POLL_S)  # nothing announces what another process writes
        return False


def begin(kind: str, at: Path, name: str, sleep_s: float = SLEEP_S, **more: str) -> Victims:
    """Start the run `name`; `more` is for its environment."""
    words = ["train", *(["--import", str(at / "callbacks.py")] * (kind == "everything"))]
    points = ",".join(f"{point}@*:sleep:{sleep_s}" for point in ("forward", "backward"))
    environment = {"HETERO_CACHE": str(at / f"cache-{name}"), "HETERO_FAILPOINT": points, **more}
    config = configuration(at, kind, name)
    train = Command(config, *words, name=f"said-{name}", environment=environment)
    return Victims(train, at / name)


def prepare(at: Path) -> None:
    """What all runs below `at` need."""
    save_llama(at / "llama", layers=4)
    (at / "callbacks.py").write_text(CALLBACKS)


def different(cut: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """The parts of what two runs have left that are not equal."""
    names = sorted(whole.keys() | cut.keys())
    unequal = [name for name in names if whole.get(name) != cut.get(name)]
    # What TensorBoard's writer has not written dies with its process.
    if cut["tensorboard"] <= whole["tensorboard"]:
        unequal = [name for name in unequal if name != "tensorboard"]
    return unequal


def trial(kind: str, at: Path, name: str, kills: Sequence[Kill]) -> dict[str, Any]:
    killed: list[tuple[int, str, list[str]]] = []
    began = time.monotonic()
    run = begin(kind, at, name)
    try:
        for step, moment, who in kills:
            if not run.until(moment, step):
                break
            killed.append((run.step(), who, run.kill(who)))
        run.until(0.0, sys.maxsize)
    finally:
        run.train.end()
    seconds = round(time.monotonic() - began, 1)
    count = sum(len(victims) for _, _, victims in killed)
    return {"kills": count, "killed": killed, "commands": run.train.given, "seconds": seconds}


def trials(kind: str, at: Path, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    prepare(at)
    trial(kind, at, "whole", [])
    whole = found(at / "whole")
    for seed in seeds:
        told = trial(kind, at, f"cut-{seed}", schedule(kind, seed))
        cut = found(at / f"cut-{seed}")
        yield {"kind": kind, "seed": seed, "different": different(cut, whole), **told}


if __name__ == "__main__":
    for line in trials(sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])):
        print(json.dumps(line), flush=True)
