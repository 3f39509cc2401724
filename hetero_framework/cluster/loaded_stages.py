"""`LoadedStages`: what all processes say of a plan's stages, and the check of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property

from hetero_framework.config import Config
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.threads import wait_for
from hetero_framework.engine.grad_clip import ModelOrder
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.models.files import fingerprint

Trainable = list[list[tuple[str, tuple[int, ...]]]]


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
        self._fingerprints: dict[int, tuple[str, Mapping[str, str]]] = {}
        self._trainable: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.ties: dict[int, Mapping[str, str]] = {}
        """For each stage, {target: source} of parameters that are tied to an earlier stage."""

    def note(
        self,
        process: str,
        stage: int,
        weights: Mapping[str, str],
        trainable: list[tuple[str, tuple[int, ...]]],
        ties: Mapping[str, str],
    ) -> None:
        """Take a stage's report: hashes of the weights that it read, trained parameters, ties."""
        self._fingerprints[stage], self._trainable[stage] = (process, weights), trainable
        self.ties[stage] = ties

    def check(self, deadline: float) -> None:
        """Raise UserError if the stages are not of this machine's model, or the model is not read
        by the deadline. Raises ProtocolError if the stages do not make one model."""
        trained = [name for stage in self._trainable.values() for name, _ in stage]
        sources = {source for tied in self.ties.values() for source in tied.values()}
        if len({*trained}) < len(trained) or not sources.issubset(trained):
            raise ProtocolError("what the workers say of their stages does not make one model")
        if not wait_for([self._expected], deadline - time.monotonic()):
            raise UserError(
                "this machine has not read the model's files in "
                f"{self._config.training.load_timeout_s:.0f} s",
                hint="their disk is slow or hangs; training.load_timeout_s sets this limit",
            )
        fingerprint.check_same_model(list(self._fingerprints.values()), self._expected.result())

    @property
    def trainable(self) -> Trainable:
        """The trained parameters of each stage, with their places in the whole model."""
        return [self._trainable[spec.index] for spec in self._config.plan.stages]

    @cached_property
    def order(self) -> ModelOrder:
        """Puts the norms of all gradients into the order of the whole model."""
        return ModelOrder(self.trainable)

    @property
    def needs(self) -> list[bool]:
        """Whether the input of each stage needs a gradient."""
        return gradient_needs(self.trainable)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all weights."""
        return fingerprint.summary(weights for _, weights in self._fingerprints.values())

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


def gradient_needs(trainable: Trainable) -> list[bool]:
    """For each stage whether anything trainable lies before it: its input then needs a gradient."""
    return [any(trainable[:stage]) for stage in range(len(trainable))]
