"""`LoadedStages`: the reports of all processes on a plan's stages, and the check of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property

from hetero_framework.config import Config
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import LoadedStage
from hetero_framework.core.threads import wait_for
from hetero_framework.engine.grad_clip import ModelOrder
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.models.files import fingerprint


class LoadedStages:
    """The reports of a plan's loaded stages, and the check that they make one model."""

    def __init__(
        self,
        config: Config,
        expected: Future[fingerprint.Fingerprint | None],
        statistics: Sequence[str],
    ) -> None:
        """`expected` is the fingerprint of the model's files on this machine. `statistics` names
        what training changes besides the weights (`ModelStructure.statistics`)."""
        self._config = config
        self._expected = expected
        self._statistics = statistics
        self._reports: dict[int, tuple[str, LoadedStage]] = {}

    def note(self, process: str, report: LoadedStage) -> None:
        """Take the report of a process on a stage, also in place of an earlier report."""
        self._reports[report.index] = process, report

    def check(self, deadline: float) -> None:
        """Raise UserError if the stages are not of this machine's model, or the model is not read
        by the deadline. Raises ProtocolError if the stages do not make one model."""
        trained = [entry.name for _, stage in self._reports.values() for entry in stage.trainable]
        sources = {source for tied in self.ties.values() for source in tied.values()}
        if len({*trained}) < len(trained) or not sources.issubset(trained):
            raise ProtocolError("what the workers say of their stages does not make one model")
        if not wait_for([self._expected], deadline - time.monotonic()):
            raise UserError(
                "this machine has not read the model's files in "
                f"{self._config.training.load_timeout_s:.0f} s",
                hint="their disk is slow or hangs; training.load_timeout_s sets this limit",
            )
        read = [(process, stage.fingerprint) for process, stage in self._reports.values()]
        fingerprint.check_same_model(read, self._expected.result())

    @property
    def ties(self) -> dict[int, dict[str, str]]:
        """For each stage, {target: source} of parameters that are tied to an earlier stage."""
        return {index: stage.ties for index, (_, stage) in self._reports.items()}

    @property
    def trainable(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """The trained parameters of each stage, with their places in the whole model."""
        stages = (self._reports[spec.index][1] for spec in self._config.plan.stages)
        return [[(entry.name, entry.index) for entry in stage.trainable] for stage in stages]

    @cached_property
    def order(self) -> ModelOrder:
        """Puts the norms of all gradients into the order of the whole model."""
        return ModelOrder(self.trainable)

    @property
    def needs(self) -> list[bool]:
        """Whether the input of each stage needs a gradient: something before it is trained."""
        trainable = self.trainable
        return [any(trainable[:stage]) for stage in range(len(trainable))]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all weights."""
        return fingerprint.summary(stage.fingerprint for _, stage in self._reports.values())

    @property
    def trained(self) -> dict[int, list[str]]:
        """The names of each stage's trained parameters."""
        return {k: [name for name, _ in stage] for k, stage in enumerate(self.trainable)}

    @property
    def trained_names(self) -> list[str]:
        """All trained parameters, in the order of the whole model."""
        everything = [parameter for stage in self.trainable for parameter in stage]
        return [name for name, _ in sorted(everything, key=lambda parameter: parameter[1])]

    @property
    def state_names(self) -> list[list[str]]:
        """For each stage, the names of trained parameters and of what else training changes."""
        names = [*self.trained.values()]
        for name in self._statistics:
            layer, stages = int(name.split(".")[1]), self._config.plan.stages
            owner = next(s.index for s in stages if s.start <= layer < s.end)
            names[owner].append(name)
        return names


def planned(config: Config, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """The members of `workers` to which the plan gives layers."""
    return [worker for worker in workers if worker in config.plan.owners]
