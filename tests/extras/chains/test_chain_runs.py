"""Chains of modules whatever the cut: the same bits, and those of a plain loop of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.errors import CallbackError
from hetero_framework.extras.exporting.checkpoint_export import export_checkpoint
from hetero_framework.models.files.export import OutputDirectory
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.integration.test_best_model import Ending
from tests.integration.test_parity import assert_same, weights
from tests.integration.test_recovery import Killer
from tests.pools import read_metrics
from tests.samples import DEVICE, free_ports, plan_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TRAINING = {
    **{"objective": "sequential", "max_steps": 5, "per_device_train_batch_size": 4},
    **{"gradient_accumulation_steps": 3, "learning_rate": 0.01, "eval_steps": 5},
    **{"eval_strategy": "steps", "report_to": "none", "visualize": False},
    **{"save_strategy": "no", "replicate_steps": 2},
}
LONG = pytest.mark.long
CUTS = {"two": [3], "three": [2, 4], "interleaved": [1, 2, 4]}


@pytest.fixture(autouse=True)
def imported(monkeypatch):
    monkeypatch.setattr(control, "_imported", [])
    monkeypatch.setattr(control, "_modules", [])


def configuration(
    name: str, output: Path, cuts: list[int], folder: Path = EXAMPLES, **training: Any
) -> Config:
    control.import_file(folder / f"{name}.py")
    ports = free_ports(3)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": DEVICE, "num_threads": 1}
    plan = plan_of(*zip(["local", 1, 2, "local"], [*cuts, 6], strict=False))
    used = {entry["id"] for entry in plan}
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": i, "port": ports[i]} for i in (1, 2) if i in used],
            "shard_plan": plan,
            "model": {"chain": name},
            "data": {"train": "train_set", "eval": "test_set"},
            "training": {**TRAINING, "output_dir": str(output), **training},
        }
    )


def test_one_process_trains_as_a_loop_of_torch(tmp_path):
    settings = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    summary = train(configuration("resnet", tmp_path / "run", [], **settings))
    own = control._modules[-1]
    torch.manual_seed(42)
    chain = own.resnet().train()
    optimizer = torch.optim.AdamW(chain.parameters(), lr=0.01, weight_decay=0.0)
    count = len(own.train_set)
    order = list(SeedableRandomSampler(range(count), data_seed=42, num_samples=count))
    losses = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(5):
        total = 0.0
        for k in range(3):
            first = (3 * step + k) * 4
            rows = [own.train_set[i] for i in order[first : first + 4]]
            pictures, classes = (torch.stack(part) for part in zip(*rows, strict=True))
            loss = own.loss(chain(pictures), classes)[0] / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    torch.set_num_threads(threads)
    assert summary.losses == pytest.approx(losses, rel=1e-6)
    assert_same(weights(tmp_path / "run"), chain.state_dict())
    assert_same(summary.load().state_dict(), chain.state_dict())


@pytest.mark.parametrize("name", seldom(["resnet", "vit"], "vit"))
@pytest.mark.parametrize("cut", seldom(CUTS, *CUTS))
def test_a_chain_does_not_depend_on_the_cut(name, cut, tmp_path):
    whole = train(configuration(name, tmp_path / "whole", []))
    assert len(set(whole.losses)) == 5
    settings = {"gradient_checkpointing": cut != "two"}
    other = train(configuration(name, tmp_path / "cut", CUTS[cut], **settings))
    assert other.losses == whole.losses
    assert other.metrics["eval_accuracy"] == whole.metrics["eval_accuracy"]
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@LONG
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_a_chain_goes_on_under_another_plan(name, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = train(configuration(name, tmp_path / "whole", []))
    with pytest.raises(CallbackError):
        train(configuration(name, tmp_path / "run", [2, 4], **saving), callbacks=[Ending(3)])
    train(configuration(name, tmp_path / "run", [3], **saving).with_changes(resume_step="latest"))
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert whole.steps == 5


def test_an_nn_sequential_itself_does_not_depend_on_the_cut(tmp_path):
    """One that the file holds, with its weights, in place of a function that returns one."""
    text = (EXAMPLES / "resnet.py").read_text()
    made = "torch.manual_seed(3)\nresnet = resnet()\n"
    made += "resnet[5] = nn.Sequential(nn.Dropout(0.3), resnet[5])\n"
    (tmp_path / "resnet.py").write_text(f"{text}\n{made}")
    whole = train(configuration("resnet", tmp_path / "whole", [], tmp_path, max_steps=3))
    assert all(p.grad is None for p in control.named("resnet").parameters())
    other = train(configuration("resnet", tmp_path / "cut", [2, 4], tmp_path, max_steps=3))
    assert other.losses == whole.losses
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@LONG
def test_a_killed_worker_costs_no_statistics(tmp_path):
    """The running means of BatchNorm are those of the steps that count."""
    train(configuration("resnet", tmp_path / "whole", []))
    notes = Killer({3: (1,), 4: (2,)})
    train(configuration("resnet", tmp_path / "run", [2, 4]), progress=notes)
    assert [line for line in notes.lines if "training goes on after step" in line]
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_checkpoint_holds_the_statistics(tmp_path):
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    train(configuration("resnet", tmp_path / "run", [], **saving))
    output = OutputDirectory(tmp_path / "exported" / "model")
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step_2", output)
    assert_same(weights(tmp_path / "exported"), weights(tmp_path / "run"))


@LONG
def test_a_worker_with_another_file_is_refused(tmp_path):
    config = configuration("resnet", tmp_path / "run", [3])
    other = tmp_path / "other.py"
    text = (EXAMPLES / "resnet.py").read_text()
    other.write_text(text.replace("Residual(32, 32, 1)", "Residual(32, 32, 2)"))
    control._imported[:] = [other]  # what the workers are started with
    with pytest.raises(Exception, match="makes another chain 'resnet' than that of the run"):
        train(config)
