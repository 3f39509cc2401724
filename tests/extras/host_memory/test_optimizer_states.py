"""Optimizer states in host memory give the bits of a stage that holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_framework.core.devices import Device
from hetero_framework.engine.out_of_memory import explaining
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.errors import OutOfMemory
from hetero_framework.extras.host_memory import optimizer_states
from hetero_framework.extras.host_memory.optimizer_states import (
    OptimizerStates,
    _travels,
    in_groups,
)
from hetero_framework.extras.host_memory.visitors import HostTensors
from tests.cases import spread
from tests.extras.host_memory.stages import tensors_of
from tests.extras.host_memory.training import LORA, Training, Watched, config, differences

pytestmark = pytest.mark.usefixtures("own_memory")
OPTIMIZERS = [
    *("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adamw_8bit", "paged_adamw_32bit"),
    *("lion_8bit", "ademamix_8bit", "rmsprop"),
]
ARGUMENTS = {"sgd": {"optim_args": "momentum=0.9"}}
GROUP = 20_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several groups in a small stage, and all states travel."""
    monkeypatch.setattr(optimizer_states, "STATES_GROUP_BYTES", GROUP)
    monkeypatch.setattr(optimizer_states, "_SMALL_BYTES", 0)


def groups_of(stage: Stage) -> list[list[torch.Tensor]]:
    return in_groups(p for group in stage._optimizer.param_groups for p in group["params"])


def largest(groups: list[list[torch.Tensor]]) -> int:
    """Bytes of AdamW's states of the largest group."""
    return max(sum(8 * p.numel() + 512 for p in group) for group in groups)


def test_the_ways_of_states_are_recorded():
    training = Training(config(offload_optimizer=True), Device())
    ways = []
    for step in range(2):
        training.step(step)
        ways.append(training.visits())
    count = len(groups_of(training.stages[0]))
    assert ways[0]["states out"] == ways[1]["states out"] == ways[1]["states in"] == count > 1


def states_of(training: Training) -> list[OptimizerStates]:
    found = [stage.residence._states for stage in training.stages]  # type: ignore[union-attr]
    assert all(isinstance(states, OptimizerStates) for states in found)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # no paged memory on a CPU
@pytest.mark.parametrize(("optim", "adapter"), spread(OPTIMIZERS, {"full": {}, "lora": LORA}))
def test_every_optimizer_gives_the_same_bits(optim, adapter):
    if "8bit" in optim or "paged" in optim:
        pytest.importorskip("bitsandbytes")
    settings = {"optim": optim, **ARGUMENTS.get(optim, {}), **adapter}
    resident = Training(config([2], **settings), Device()).train()
    offloaded = Training(config([2], offload_optimizer=True, **settings), Device())
    assert differences(resident, offloaded.train()) == []
    for states, stage in zip(states_of(offloaded), offloaded.stages, strict=True):
        assert len(groups_of(stage)) > 1
        kept = [t for v in stage._optimizer.state.values() for t in v.values()]
        hosts = {id(host) for host in states._hosts.values()}
        assert hosts == {id(t) for t in kept if isinstance(t, torch.Tensor)}


def test_host_memory_is_the_same_in_every_step():
    training = Training(config(offload_optimizer=True), Device())
    [states] = states_of(training)
    training.step(0)
    places = {at: host.data_ptr() for at, host in states._hosts.items()}
    nbytes = states._memory.nbytes
    training.step(1)
    assert places == {at: host.data_ptr() for at, host in states._hosts.items()}
    assert states._memory.nbytes == nbytes
    assert sum(host.nbytes for host in states._hosts.values()) <= nbytes


@pytest.mark.parametrize("steps", [1, 2])
def test_the_device_has_three_groups_at_most(steps):
    device = Watched()
    training = Training(config(offload_optimizer=True), device)
    for step in range(steps):
        training.step(step)
    [stage] = training.stages
    groups = groups_of(stage)
    assert len(groups) > 8
    for stream, (_, nbytes) in device.most.items():
        assert nbytes <= 3 * largest(groups), stream


def test_loading_brings_three_groups_at_most_to_the_device():
    parts = Training(config(offload_optimizer=True), Device())
    parts.step(0)
    device = Watched()
    training = Training(config(offload_optimizer=True), device)
    [stage] = training.stages
    for part in parts.parts()[0]:
        # Of another type, so that they are not taken as they are on the CPU.
        wide = {name: tensor.double() for name, tensor in part.tensors.items()}
        stage.load_state("checkpoint", StatePart(wide, part.values, part.last))
    assert 0 < device.most["states out"][1] <= 3 * largest(groups_of(stage))
    assert differences(([], parts.state()), ([], training.state())) == []


@pytest.mark.parametrize(
    ("optim", "offloads"),
    spread(
        ["adamw_torch", "adamw_torch_fused", "adamw_8bit"],
        [(True, False), (False, True), (True, True)],
    ),
)
def test_a_checkpoint_is_that_of_any_run(optim, offloads):
    before, after = offloads
    if "8bit" in optim:
        pytest.importorskip("bitsandbytes")
    expected = Training(config([2], optim=optim), Device()).train(4)
    first = Training(config([2], optim=optim, offload_optimizer=before), Device())
    losses = first.train(2)[0]
    # The stage that takes it over has gone on: nothing of that may stay.
    second = Training(config([2], optim=optim, offload_optimizer=after), Device())
    second.train(3)
    second.load(first.parts())
    for step in (2, 3):
        losses += second.step(step)
    assert differences(expected, (losses, second.state())) == []


def test_loaded_states_leave_the_device():
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.ones(1000)
    optimizer, states = torch.optim.AdamW([weight]), OptimizerStates(Device())
    states.step(optimizer)
    states.load(optimizer, {weight: "w"}, {"w": dict(optimizer.state[weight])})
    assert not states._leaving


def test_a_snapshot_is_of_its_step_despite_later_steps():
    training = Training(config([2], offload_optimizer=True), Device())
    training.step(0)
    expected = training.state()
    snapshots = [stage.snapshot(lasting=True) for stage in training.stages]

    def keep() -> None:
        for snapshot in snapshots:
            snapshot.keep()

    training.step(1, before_commit=keep)
    found = tensors_of([[*snapshot.parts()] for snapshot in snapshots])
    assert differences(([], expected), ([], found)) == []


def test_a_snapshot_waits_for_states_that_return(monkeypatch):
    training = Training(config(offload_optimizer=True), Device())
    training.step(0)
    [states], waited = states_of(training), list[str]()
    monkeypatch.setattr(states._returned, "wait", lambda: waited.append("here"))
    training.state()
    assert waited


def test_an_aborted_attempt_changes_no_state():
    training = Training(config([2], offload_optimizer=True), Device())
    training.step(0)
    before = training.state()
    training.step(1, tasks=5)
    assert differences(([], before), ([], training.state())) == []


def test_a_parameter_without_a_gradient_keeps_its_state():
    device = Watched()
    training = Training(config(offload_optimizer=True), device)
    [stage] = training.stages
    training.step(0)
    before, out = training.state(), device.copies["states out"]
    name, parameter = stage._parameters[3]

    def forget() -> None:
        parameter.grad = None

    training.step(1, before_commit=forget)
    after = training.state()
    assert device.copies["states in"] == device.copies["states out"] - out == out - 3
    unchanged = {key for key, tensor in before.items() if torch.equal(tensor, after[key])}
    assert unchanged == {key for key in before if key.endswith(f"/{name}")}


def test_groups_keep_the_order_and_their_size():
    sizes = [500, 1500, 600, 9000, 100, 100]
    groups = [[p.numel() for p in group] for group in in_groups(map(torch.zeros, sizes))]
    assert groups == [[500, 1500], [600], [9000], [100, 100]]


def test_small_states_stay(monkeypatch):
    monkeypatch.setattr(optimizer_states, "_SMALL_BYTES", 1024)
    training = Training(config(offload_optimizer=True), Device())
    training.step(0)
    [states] = states_of(training)
    assert {key for _, key in states._hosts} == {"exp_avg", "exp_avg_sq"}
    assert all(host.nbytes > 1024 for host in states._hosts.values())


def test_a_step_in_two_halves_is_the_same():
    """As where a process is killed between them."""
    whole = Training(config(offload_optimizer=True), Device())
    halved = Training(config(offload_optimizer=True), Device())
    [stage] = halved.stages
    optimizer = stage._optimizer

    def half() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for _, parameter in stage._parameters:
            parameter.grad.mul_(0.5)
        stage._step_half(optimizer)
        for _, parameter in stage._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)

    found = halved.step(0, before_commit=half)
    assert differences((whole.step(0), whole.state()), (found, halved.state())) == []


def test_host_memory_that_runs_out_is_told_as_that_of_the_machine(monkeypatch):
    training = Training(config(offload_optimizer=True), Device())
    training.device.name = "cuda:0"

    def full(self: HostTensors, nbytes: int) -> torch.Tensor:
        text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 999999999999999"
        raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {text} bytes.")

    monkeypatch.setattr(HostTensors, "take", full)
    with (
        pytest.raises(OutOfMemory, match="step: host memory ran out"),
        explaining("step", training.device),
    ):
        training.step(0)


class Changing(torch.optim.Optimizer):
    """Its state has another type in every other step. It looks at all states that there are."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(len(self.state))
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            sums = self.state[parameter].get("sums", torch.zeros(parameter.shape)) + parameter.grad
            other = torch.float64 if sums.dtype == torch.float32 else torch.float32
            self.state[parameter]["sums"] = sums.to(other)


def test_a_state_may_change_its_type_and_only_those_of_the_group_are_there():
    parameters = [torch.nn.Parameter(torch.zeros(2000)) for _ in range(4)]
    optimizer, states = Changing(parameters), OptimizerStates(Device())
    for step in range(1, 4):
        for k, parameter in enumerate(parameters):
            parameter.grad = torch.full((2000,), k + 0.5)
        states.step(optimizer)
        states.settle()
        for k, parameter in enumerate(parameters):
            sums = optimizer.state[parameter]["sums"]
            assert sums.dtype == (torch.float64 if step % 2 else torch.float32)
            assert sums.tolist() == [step * (k + 0.5)] * 2000
    assert optimizer.seen == [0] * 4 + [1] * 8


def test_states_that_others_have_put_there_count():
    resident = Training(config(), Device())
    training = Training(config(offload_optimizer=True), Device())
    for one in (resident, training):
        one.step(0)
        [stage] = one.stages
        for state in stage._optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] + 1.0
    assert resident.step(1) == training.step(1)
    assert differences(([], resident.state()), ([], training.state())) == []


def test_what_is_not_worth_it_or_no_plain_tensor_stays(monkeypatch):
    monkeypatch.setattr(optimizer_states, "_SMALL_BYTES", 1024)
    parameter, paged = torch.zeros(600), torch.zeros(600)
    paged.is_paged = True  # type: ignore[attr-defined]
    assert _travels(torch.zeros(257), parameter)
    for state in (
        *(3, None, torch.zeros(256), torch.nn.Parameter(parameter), paged),
        *(torch.zeros(600, device="meta"), torch.zeros(30, 40).t()),
    ):
        assert not _travels(state, parameter)
