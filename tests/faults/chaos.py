"""The same training twice, the second time with processes killed at random.

    python -m tests.faults.chaos --config cluster.json --steps 40 --kills 6 --seed 3

What is killed after which step follows from the seed; the moment within a step does not. The
disturbed run's command is given again when its coordinator was killed, as a service manager would.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero_framework.cluster.roles import local_worker_ids
from hetero_framework.config import Config, load_config
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.errors import HeteroError, PeerLostError, StoppedEarly, UserError
from hetero_framework.log import Lines, log_to, to_stderr
from hetero_framework.units import plural
from tests.faults.programs import last_step

COORDINATOR = "coordinator"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What came of it; seconds are those of the whole runs."""

    same: bool
    steps: int
    kills: int
    commands: int
    calm_seconds: float
    seconds: float
    seed: int


def victims(config: Config) -> list[str]:
    """What can be killed from here: the coordinator, and the workers of its machine."""
    return [COORDINATOR, *(f"worker {worker}" for worker in local_worker_ids(config))]


def schedule(names: Sequence[str], steps: int, kills: int, seed: int) -> dict[int, str]:
    """Who is killed after which step; each one at least once where there are enough kills."""
    dice = random.Random(seed)
    chosen = [*names, *dice.choices(names, k=kills)][:kills]
    dice.shuffle(chosen)
    return dict(zip(sorted(dice.sample(range(1, steps), kills)), chosen, strict=True))


def chaos(
    config: Config, directory: Path, *, steps: int, kills: int, seed: int, options: Sequence[str]
) -> Verdict:
    """Train twice below `directory` and compare the results. `options` name the configuration and
    go to both commands.

    Raises UserError for more kills than steps or a directory in use, HeteroError for a run that
    ends by itself before it is over, and PeerLostError for one that does not go on.
    """
    if not 0 <= kills < steps:
        raise UserError(f"{kills} kills do not fit into {steps} steps", hint="raise --steps")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty", hint="choose another one: --output-dir DIR")
    plan = schedule(victims(config), steps, kills, seed)
    _log.info("seed %d: %s", seed, "; ".join(f"{who} after step {at}" for at, who in plan.items()))
    calm = _Run(config, directory / "calm", steps, options)
    calm_seconds = calm.finish({})
    hard = _Run(config, directory / "chaos", steps, options)
    seconds = hard.finish(plan)
    same = calm.digests() == hard.digests()
    return Verdict(same, hard.step(), kills, hard.given, calm_seconds, seconds, seed)


def text(verdict: Mapping[str, Any]) -> str:
    """For people: `asdict` of a Verdict."""
    found = "the same, byte for byte" if verdict["same"] else "NOT THE SAME"
    kills, given = plural(verdict["kills"], "kill"), plural(verdict["commands"], "time")
    return (
        f"{verdict['steps']} steps, {kills}, the command given {given}: the results are {found}\n"
        f"undisturbed {verdict['calm_seconds']:.0f} s, disturbed {verdict['seconds']:.0f} s; "
        f"seed {verdict['seed']}"
    )


class _Run:
    """`hetero train`, given again for as long as it is killed."""

    def __init__(self, config: Config, output: Path, steps: int, options: Sequence[str]) -> None:
        self._output = output.absolute()
        self._output.mkdir(parents=True)
        self._result = self._output / config.result_dir.name
        training = config.training
        self._patience_s = training.step_timeout_s + training.load_timeout_s
        self._command = [sys.executable, "-m", "hetero_framework", "train", *options]
        self._command += ["--output-dir", str(self._output), "--set", "checkpoint_dir=null"]
        self._command += ["--set", f"training.max_steps={steps}"]
        self.given = 0
        self._process: subprocess.Popen[bytes] | None = None

    def finish(self, plan: dict[int, str]) -> float:
        """Run to the end, killing by plan; how many seconds it took."""
        began = time.monotonic()
        try:
            self._give()
            for at, who in sorted(plan.items()):
                self._until(lambda: self._is_over() or self.step() >= at)  # noqa: B023
                self._kill(who, at)
            self._until(self._is_over)
        finally:
            self._end()
        return time.monotonic() - began

    def step(self) -> int:
        """The last step that was written down."""
        return last_step(self._output / "metrics.jsonl")

    def digests(self) -> dict[str, str]:
        """Of the tensors of the result."""
        files = sorted(self._result.glob("*.safetensors"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def _give(self) -> None:
        self.given += 1
        with (self._output / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _is_over(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        if code is None or code == 0:
            return code == 0
        if code >= 0 and code != StoppedEarly.exit_code:
            log = (self._output / "output.log").read_text(encoding="utf-8", errors="replace")
            raise HeteroError(f"the run ended with exit code {code}; its end:\n{log[-2000:]}")
        self._give()
        return False

    def _kill(self, who: str, at: int) -> None:
        process = self._coordinator() if who == COORDINATOR else self._worker(who)
        if process is None:
            _log.info("after step %d: %s is not there just now", at, who)
            return
        with suppress(psutil.NoSuchProcess):
            process.kill()
            _log.info("after step %d: killed %s", at, who)
        if who == COORDINATOR:
            assert self._process is not None
            self._process.wait(timeouts.EXIT_S)

    def _coordinator(self) -> psutil.Process | None:
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid)
        return None

    def _worker(self, who: str) -> psutil.Process | None:
        number: WorkerId = who.removeprefix("worker ")
        parent = self._coordinator()
        with suppress(psutil.Error):
            for child in parent.children() if parent is not None else ():
                words = child.cmdline()
                if "--worker-id" in words and words[words.index("--worker-id") + 1] == number:
                    return child
        return None

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for it; PeerLostError where no step is done for too long."""
        step, since = -1, time.monotonic()
        while not condition():
            if self.step() != step:
                step, since = self.step(), time.monotonic()
            if time.monotonic() - since > self._patience_s:
                raise PeerLostError(f"no step has been done after step {step} for too long")
            time.sleep(timeouts.EXIT_TICK_S)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeouts.EXIT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict; 0 where the results are the same."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.chaos")
    parser.add_argument("--config", default="hetero_config.json", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/chaos"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=20, help="of each of the two runs")
    parser.add_argument("--kills", type=int, default=4, help="processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="chooses processes and steps")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    options = ["--config", given.config, *(w for pair in given.set for w in ("--set", pair))]
    config = load_config(given.config, given.set)
    config.require("model", "data")
    counts = {"steps": given.steps, "kills": given.kills, "seed": given.seed}
    with log_to("INFO", Lines(to_stderr)):
        verdict = chaos(config, given.output_dir, options=options, **counts)
    print(json.dumps(asdict(verdict), indent=2) if given.json else text(asdict(verdict)))
    return 0 if verdict.same else HeteroError.exit_code


if __name__ == "__main__":
    sys.exit(main())
