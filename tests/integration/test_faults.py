"""What breaks in a run: links, processes, patience. Real sockets, real processes.

A broken link costs a repeated step and nothing else: the losses, norms and weights of the run are
those of an undisturbed one, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core.protocol import MessageType
from hetero_framework.trainer import cluster
from hetero_framework.trainer.coordinator import train
from hetero_framework.visualizer.progress import Progress
from tests.fault_proxy import FaultProxy, FrameCut
from tests.integration.conftest import Pool, read_metrics
from tests.integration.test_parity import LORA, assert_same, weights

pytestmark = pytest.mark.xdist_group("pool")

M = MessageType
TRAINING = {
    "save_strategy": "steps",
    "save_steps": 3,
    "eval_steps": 4,
    "verify_architecture": False,
    "liveness_timeout_s": 3.0,
}


class Notes(Progress):
    """Keeps what the user would read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def make(pool: Pool, llama: Path, texts: Path, tmp_path: Path) -> Callable[..., Config]:
    """A configuration for the pool; `through` has workers' addresses replaced by proxies'."""

    def build(
        name: str, cuts: list[int], through: dict[int, FaultProxy] | None = None, **sections: Any
    ) -> Config:
        sections.setdefault("adapter", LORA)
        sections["training"] = {**TRAINING, **sections.get("training", {})}
        raw = pool.config(
            tmp_path / name,
            cuts,
            model={"name_or_path": str(llama)},
            data={"train": str(texts), "max_length": 64, "eval": str(texts)},
            **sections,
        )
        raw["workers"] = [
            {**w, "port": through[w["id"]].port} if through and w["id"] in through else w
            for w in raw["workers"]
        ]
        return Config.from_dict(raw)

    return build


@pytest.fixture
def proxies(pool: Pool) -> Iterator[dict[int, FaultProxy]]:
    """A proxy before each of workers 1 and 2."""
    with ExitStack() as stack:
        yield {
            w["id"]: stack.enter_context(FaultProxy((w["ip"], w["port"])))
            for w in pool.machines["workers"][:2]
        }


@pytest.fixture(scope="module")
def whole(
    pool: Pool, llama: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Output directory of the undisturbed run in one process, with LoRA or "full"."""
    done: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp("whole") / kind
            raw = pool.config(
                done[kind],
                [],
                model={"name_or_path": str(llama)},
                data={"train": str(texts), "max_length": 64, "eval": str(texts)},
                adapter=LORA if kind == "lora" else None,
                training=TRAINING,
            )
            train(Config.from_dict(raw), progress=Notes())
        return done[kind]

    return get


def assert_equal_runs(output: Path, whole: Path) -> None:
    assert read_metrics(output) == read_metrics(whole)
    assert_same(weights(output), weights(whole))


UP = [M.STEP, M.INPUTS, M.FORWARD, M.COLLECT, M.COMMIT, M.STATE_REQUEST, M.ABORT]
DOWN = [M.LOSS, M.BACKWARD, M.GRADIENTS, M.COMMITTED, M.STATE, M.ABORTED]


def every_cut(reset: bool, first: bool) -> list[FrameCut]:
    """Each frame type of each direction, before, in and after it, for the first or last worker."""
    kinds = [("up", k) for k in UP] + [("down", k) for k in DOWN]
    if first:
        kinds += [("down", M.FORWARD), ("up", M.BACKWARD)]
        kinds.remove(("down", M.LOSS))
    cuts = []
    for direction, kind in kinds:
        for where in ("before", "middle", "after"):
            cuts.append(FrameCut(direction, kind, where, reset))
            if kind in (M.ABORT, M.ABORTED):  # there is none without a cut before it
                cuts.insert(-1, FrameCut("up", M.INPUTS, "after", reset))
    return cuts


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("worker", [1, 2])
def test_a_link_cut_at_any_frame_changes_nothing(
    worker, reset, make, proxies, whole, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(cluster, "_MAX_RECOVERIES", 50)
    cuts = every_cut(reset, first=worker == 1)
    proxies[worker].cuts.extend(cuts)
    train(make("cut", [2, 4], proxies), progress=Notes())
    assert list(proxies[worker].cuts) == []
    assert proxies[worker].connections == len(cuts) + 1
    assert_equal_runs(tmp_path / "cut", whole("lora"))
