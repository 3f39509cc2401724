"""Rounds against torchft's own LocalSGD and DiLoCo: two processes with whole models, on the same
samples, whose islands here are cut in one, two and three."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_framework.extras.islands import opening as islands
from hetero_framework.extras.islands.outer_rounds import OuterRounds
from hetero_framework.extras.islands.quorums import Quorums
from tests.extras.islands.optional import need_torchft
from tests.extras.islands.test_islands import quorums, train_pair  # noqa: F401
from tests.samples import WORDS

pytestmark = [
    pytest.mark.islands,
    pytest.mark.xdist_group("pool"),
    pytest.mark.usefixtures("nothing_left"),
]

TRAINING = {
    **{"max_steps": 24, "learning_rate": 1e-3, "lr_scheduler_type": "constant"},
    **{"warmup_steps": 0, "max_grad_norm": 0.5},
}
SECTION = {
    **{"method": "diloco", "sync_steps": 4, "fragments": 1, "delay_steps": 0, "mixing": 0.0},
    **{"outer_learning_rate": 0.7, "outer_momentum": 0.9, "share": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "local_sgd": {"method": "local_sgd"},
    "plain": {},
    "fragments": {"fragments": 2},
    "delay": {"delay_steps": 1},
    "mixing": {"mixing": 0.5},
    "streaming": {"fragments": 2, "delay_steps": 1, "mixing": 0.5},
}


class Kept:
    """What the islands of one run did: their micro-batches and, for each synchronisation before
    the last round, the weights that it came to. torchft knows no last round, in which nothing is
    delayed and all fragments come to their end."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Any]] = {}
        self.agreed: dict[str, list[dict[str, Tensor]]] = {}
        self.fragments: list[tuple[str, ...]] = []

    def recording(kept) -> type[OuterRounds]:
        class Recording(OuterRounds):
            def part(self, *args: Any) -> Any:
                found = super().part(*args)
                steps = kept.steps.setdefault(self._island.name, [])
                steps.append([dict(batch) for batch in found.batches])
                return found

            def _commit(self, sending: Any, after: Any, *args: Any) -> Any:
                kept.fragments = self._fragments
                if not self._round.last:
                    kept.agreed.setdefault(self._island.name, []).append(dict(after.weights))
                return super()._commit(sending, after, *args)

        return Recording


@pytest.fixture(scope="module", autouse=True)
def torchft():
    need_torchft()


@pytest.fixture
def settings(llama, tmp_path):
    """All samples have as many tokens, so that weights by tokens are those of torchft: equal."""
    lines = [json.dumps({"text": " ".join(WORDS[k % 7 :] * 3)}) for k in range(48)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = {"train": str(tmp_path / "texts.jsonl"), "max_length": 16}
    return {"model": {"name_or_path": str(llama)}, "data": data}


@pytest.fixture
def run(pool, settings, tmp_path, monkeypatch):
    def train(at: str, section: dict[str, Any], a_cuts: list[int], b_cuts: list[int]) -> Kept:
        kept = Kept()
        monkeypatch.setattr(islands, "OuterRounds", kept.recording())
        own = {"accumulation": 2, "section": section, "training": TRAINING}
        train_pair(pool, tmp_path / at, (a_cuts, b_cuts), settings, **own)
        return kept

    return train


def by_torchft(
    at: Path, runs: dict[str, Kept], cases: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Tensor]]]:
    """The same steps by torchft, two processes for all runs: what is agreed on after each
    synchronisation."""
    with ExitStack() as servers:
        for name, case in cases.items():
            (at / name).mkdir(parents=True)
            port = servers.enter_context(closing(Quorums(2))).port
            (at / name / "case.json").write_text(json.dumps({**case, "port": port}))
            for who, steps in runs[name].steps.items():
                save_steps(at / name / f"{who}.safetensors", steps)
        folders = [str(at / name) for name in cases]
        program = [sys.executable, "-m", "tests.extras.islands.torchft_rounds"]
        children = [
            subprocess.Popen([*program, who, *folders], stderr=subprocess.PIPE) for who in "ab"
        ]
        try:
            said = [child.communicate(timeout=200)[1].decode() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
    assert not any(child.returncode for child in children), said
    return {name: _agreed(at / name) for name in cases}


def save_steps(path: Path, steps: list[Any]) -> None:
    """What `tests.extras.islands.torchft_rounds` reads."""
    tensors = {
        f"{k}/{m}/{name}": tensor.contiguous()
        for k, step in enumerate(steps)
        for m, batch in enumerate(step)
        for name, tensor in batch.items()
    }
    save_file(tensors, path)


def _agreed(folder: Path) -> list[dict[str, Tensor]]:
    a, b = (load_file(folder / f"{who}.agreed.safetensors") for who in "ab")
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in a.items():
        number, _, name = key.partition("/")
        found.setdefault(int(number), {})[name] = tensor
    return [found[number] for number in sorted(found)]


def farthest(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> float:
    """The largest difference of any weight after any synchronisation of ours."""
    found = 0.0
    for one, other in zip(ours, theirs, strict=False):
        assert one.keys() == other.keys()
        found = max(found, *(float((one[key] - other[key]).abs().max()) for key in one))
    return found


def test_rounds_equal_torchft(run, settings, tmp_path):
    sections = {name: {**SECTION, **changed} for name, changed in CASES.items()}
    whole = {name: run(f"whole/{name}", section, [], []) for name, section in sections.items()}
    cases = {
        name: {
            "island": section,
            "fragments": whole[name].fragments,
            "model": settings["model"]["name_or_path"],
            "learning_rate": TRAINING["learning_rate"],
            "max_grad_norm": TRAINING["max_grad_norm"],
        }
        for name, section in sections.items()
    }
    theirs = by_torchft(tmp_path / "torchft", whole, cases)
    far = {}
    for name, section in sections.items():
        cut = run(f"cut/{name}", section, [2, 4], [3])
        for how, ours in (("whole", whole[name]), ("cut", cut)):
            for agreed in ours.agreed.values():
                assert len(agreed) == 2 * section["fragments"]
                far[name, how] = farthest(agreed, theirs[name])
    assert max(far.values()) < 1e-6, far
