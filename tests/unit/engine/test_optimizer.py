from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from hetero_framework.config import TrainingConfig
from hetero_framework.config.optimizers import optimizer_problems
from hetero_framework.engine.optimizer import (
    LearningRate,
    build_optimizer,
    load_state_tensors,
    state_tensors,
)
from hetero_framework.errors import ConfigError
from hetero_framework.models.adapters.trainable import trainable_parameters
from tests.cases import spread
from tests.unit.adapter_helpers import save_model, shards, stock
from tests.unit.data_helpers import tiny_llama

STEPS = 20


def trainer(model: PreTrainedModel, folder: Path, **arguments: Any) -> Trainer:
    settings = TrainingArguments(output_dir=str(folder), report_to="none", **arguments)
    made = Trainer(model, settings)
    made.create_optimizer_and_scheduler(num_training_steps=STEPS)
    return made


# ---- the schedule


@pytest.mark.parametrize("warmup_steps", [0, 3, 0.15], ids=["none", "steps", "share"])
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 2.0}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_schedule_is_the_trainers_at_every_step(kind, kwargs, warmup_steps, tmp_path):
    settings = {"learning_rate": 3e-4, "lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs}
    reference = trainer(tiny_llama(32), tmp_path, warmup_steps=warmup_steps, **settings)
    schedule = LearningRate(TrainingConfig(warmup_steps=warmup_steps, **settings), STEPS)
    for step in range(STEPS + 2):
        assert schedule.rate(step) == reference.lr_scheduler.get_last_lr()[0]
        reference.optimizer.step()
        reference.lr_scheduler.step()


def test_schedule_warmup_ratio_is_a_share_of_all_steps():
    a = LearningRate(TrainingConfig(warmup_ratio=0.11), STEPS)
    b = LearningRate(TrainingConfig(warmup_steps=3), STEPS)
    assert [a.rate(step) for step in range(STEPS)] == [b.rate(step) for step in range(STEPS)]


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])  # of our own, and transformers'
def test_schedule_at_any_step_is_that_of_walking_there(kind):
    training = TrainingConfig(lr_scheduler_type=kind, warmup_steps=4)
    walked, jumping = LearningRate(training, STEPS), LearningRate(training, STEPS)
    rates = [walked.rate(step) for step in range(STEPS)]
    for step in (9, 3, 0, STEPS - 1, 9, 9):
        assert jumping.rate(step) == rates[step]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"no_such_argument": 1}},
        {"lr_scheduler_type": "warmup_stable_decay"},
    ],
)
def test_schedule_with_wrong_arguments_is_a_config_error(settings):
    with pytest.raises(ConfigError, match=r"training\.lr_scheduler_type"):
        LearningRate(TrainingConfig(**settings), STEPS)


# ---- the optimizer


OPTIMIZERS: dict[str, str | None] = {
    **dict.fromkeys(
        str(name.value)
        for name in OptimizerNames
        if not list(optimizer_problems(TrainingConfig(optim=name.value)))
    ),
    "sgd": "momentum=0.9,nesterov=True",
    "rmsprop": "alpha=0.9,momentum=0.5,centered=True",
    "adagrad": "lr_decay=0.1,eps=1e-6",
    "ademamix_8bit": "beta3=0.99,alpha=2.0,t_alpha=3,t_beta3=3",
}
"""Every name that is not refused, and arguments."""


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Tied and not; all matrices, embeddings too, are large enough for an 8-bit optimizer."""
    sizes = {"n_positions": 64} if request.param == "gpt2" else {}
    return save_model(tmp_path_factory.mktemp("model"), request.param, **sizes)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(
    ("optim", "saved"), spread([*OPTIMIZERS], ["gpt2", "llama"]), indirect=["saved"]
)
def test_stages_step_as_the_trainers_optimizer_does(optim, saved, tmp_path, monkeypatch):
    # Its exceptions, by positions in an optimizer, outlive the Trainer that wrote them.
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)
    settings: dict[str, Any] = {
        **{"optim": optim, "optim_args": OPTIMIZERS[optim], "learning_rate": 3e-3},
        **{"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    }
    whole, training = stock(saved), TrainingConfig(**settings)
    parts = [(part.model, dict(trainable_parameters(part))) for part in shards(saved, 0, 1, 3, 4)]
    try:
        reference = trainer(whole, tmp_path, lr_scheduler_type="constant", **settings).optimizer
    except (ImportError, ValueError):  # not installed
        with pytest.raises(ConfigError, match=f"training.optim: '{optim}' is not usable here"):
            build_optimizer(training, *parts[0])
        return
    stages = [build_optimizer(training, model, list(own.values())) for model, own in parts]
    assert {type(stage) for stage in stages} == {type(reference)}
    own = {name: parameter for _, trained in parts for name, parameter in trained.items()}
    assert own.keys() == dict(whole.named_parameters()).keys()
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for name, parameter in whole.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            own[name].grad = parameter.grad.clone()
        for optimizer in (reference, *stages):
            optimizer.step()
    for name, parameter in whole.named_parameters():
        assert torch.equal(own[name], parameter), name


def test_build_optimizer_of_a_stage_without_decayed_parameters_has_one_group():
    model = tiny_llama(32)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    optimizer = build_optimizer(TrainingConfig(weight_decay=0.1), model, norms)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


def test_build_optimizer_that_is_not_installed_is_a_config_error():
    with pytest.raises(ConfigError, match="adamw_anyprecision"):
        build_optimizer(TrainingConfig(optim="adamw_anyprecision"), nn.Linear(2, 2), [])


# ---- its state, by parameter name


class Net(nn.Module):
    """Big enough that 8-bit optimizers keep the matrix in 8 bits (4096 elements and more)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.matrix = nn.Parameter(torch.randn(64, 128))
        self.bias = nn.Parameter(torch.randn(128))

    def train_step(self, optimizer: torch.optim.Optimizer, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()


def make_optimizer(net: Net, **settings: Any) -> tuple[torch.optim.Optimizer, dict[Any, str]]:
    training = TrainingConfig(learning_rate=1e-2, weight_decay=0.1, **settings)
    names = {parameter: name for name, parameter in net.named_parameters()}
    return build_optimizer(training, net, list(net.parameters())), names


@pytest.mark.parametrize(
    ("settings", "entries"),
    [
        ({"optim": "adamw_torch"}, {"exp_avg", "exp_avg_sq", "step"}),
        ({"optim": "adamw_torch_fused"}, {"exp_avg", "exp_avg_sq", "step"}),
        ({"optim": "adafactor"}, {"exp_avg_sq_row", "exp_avg_sq_col"}),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"momentum_buffer"}),
        ({"optim": "sgd"}, set()),
        ({"optim": "adamw_bnb_8bit"}, {"state1", "state2", "absmax1", "qmap1"}),
    ],
    ids=["adamw", "adamw-fused", "adafactor", "sgd-momentum", "sgd", "adamw-8bit"],
)
def test_state_goes_to_another_process_and_training_continues_to_the_bit(settings, entries):
    net = Net()
    optimizer, names = make_optimizer(net, **settings)
    for seed in range(3):
        net.train_step(optimizer, seed)

    # The copy of another process: same weights, fresh optimizer.
    copy = Net()
    copy.load_state_dict(net.state_dict())
    other, other_names = make_optimizer(copy, **settings)
    state = {}
    for name, (tensors, values) in state_tensors(optimizer, names).items():
        assert all(
            isinstance(value, (int, float, str, bool, type(None))) for value in values.values()
        )
        state[name] = {**{key: t.clone() for key, t in tensors.items()}, **values}
    assert entries <= set(state.get("matrix", {}))
    load_state_tensors(other, other_names, state)

    for seed in range(3, 6):
        net.train_step(optimizer, seed)
        copy.train_step(other, seed)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name))


def test_state_is_empty_before_the_first_step():
    net = Net()
    optimizer, names = make_optimizer(net, optim="adamw_torch")
    assert state_tensors(optimizer, names) == {}
