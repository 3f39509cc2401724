"""The contract of a stage, kept by the stage itself and by one behind a socket."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero_framework.cluster.worker import serve
from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.config import Config
from hetero_framework.core.devices import open_device
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.core.messages import (
    Abort,
    Aborted,
    Backward,
    Body,
    Bye,
    Commit,
    Committed,
    Forward,
    GradientNorms,
    LoadState,
    Loss,
    Message,
    Ready,
    Setup,
    Start,
    State,
    StateLoaded,
    StateRequest,
)
from hetero_framework.core.tensors import from_wire
from hetero_framework.engine import state_snapshot, wire_forms
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.optimizer import build_optimizer
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage import EarlyGradients
from hetero_framework.engine.stage_api import (
    GradientPart,
    GradientReport,
    Outcome,
    StatePart,
    StepInfo,
    Tensors,
)
from hetero_framework.engine.ties import TiedGradients, Ties
from hetero_framework.errors import CheckpointError, DeviceError, ProtocolError
from hetero_framework.models.cut.side import Bundle
from tests.cases import seldom
from tests.samples import boundary_message, free_ports, save_llama, save_tiny
from tests.waiting import WAIT_S

# A Llama of four layers, cut so that the stage under test has layers 1 and 2, or 1 to the head.
LAYERS = 4
MIDDLE = [("local", 0, 1), (1, 1, 3), ("local", 3, 4)]
LAST = [("local", 0, 1), (1, 1, 4)]
NUM_ITEMS = 11
TRAINING = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), layers=LAYERS)


def make_config(checkpoint: Path, plan: list[tuple[Any, int, int]]) -> Config:
    ports = free_ports(2)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    workers = [{**machine, "id": 1, "port": ports[1]}] if len(plan) > 1 else []
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": workers,
            "shard_plan": [{"id": i, "start": start, "end": end} for i, start, end in plan],
            "model": {"name_or_path": str(checkpoint)},
            "training": TRAINING,
        }
    )


# ---- the two implementations


@dataclass(frozen=True)
class RemoteSnapshot:
    ask: Callable[[str, int, int | None], StatePart]
    step: int | None

    def part(self, number: int) -> StatePart:
        return self.ask("checkpoint", number, self.step)

    def keep(self) -> None:
        """The worker's host does it by itself."""


def parts_of(part: Callable[[int], StatePart]) -> Iterator[StatePart]:
    last, number = False, 0
    while not last:
        found = part(number)
        yield found
        last, number = found.last, number + 1


def checkpoint_of(stage: Any) -> list[StatePart]:
    """All parts of the stage's state, in memory of their own."""
    return [
        StatePart({n: t.clone() for n, t in part.tensors.items()}, part.values, part.last)
        for part in parts_of(stage.snapshot().part)
    ]


class RemoteStage:
    """Stage 1 of a plan in a worker behind a socket, asked with the product's own messages."""

    def __init__(self, config: Config) -> None:
        self._peers = WorkerLinks(config, "contract", DEFAULT_MAX_FRAME_BYTES)
        self._peers.connect_all()
        self._num_stages = len(config.plan.stages)
        spec = config.plan.stages[1]
        self._tell(Setup(config.to_dict(), (spec.index,)))
        [ready] = self._await(Ready).body.stages
        self._trainable = [(entry.name, entry.index) for entry in ready.trainable]
        self._tell(Start((spec.index,), 1 << 20))
        self._info: StepInfo
        self._attempt = 0
        self._last_step: int | None = None
        self._norms: Message | None = None

    def close(self) -> None:
        self._peers.close(Message(Bye("the test is over")))

    def begin(self, info: StepInfo) -> None:
        # As of every attempt of a run, so also where a test begins the same one again.
        self._attempt += 1
        self._info = info = replace(info, attempt=self._attempt)
        self._peers.expect(info.step, info.attempt)
        orders = StepSchedule(in_flight_limits=(info.micro_batches,) * self._num_stages)
        self._peers.send(1, wire_forms.step_message(info, orders))

    def forward(self, k: int, inputs: Tensors, received: Bundle) -> Bundle:
        self._feed(k, inputs, received)
        return self._boundary(Forward, 2, k)

    def forward_backward(self, k: int, inputs: Tensors, received: Bundle) -> tuple[Outcome, Bundle]:
        self._feed(k, inputs, received)
        outcome = wire_forms.outcome(self._await(Loss))
        return outcome, self._boundary(Backward, 0, k)

    def evaluate(self, k: int, inputs: Tensors, received: Bundle) -> Outcome:
        self._feed(k, inputs, received)
        return wire_forms.outcome(self._await(Loss))

    def backward(self, k: int, gradients: Bundle) -> Bundle:
        self._cross(Backward, k, gradients)
        return self._boundary(Backward, 0, k)

    def report_gradients(self) -> GradientReport:
        norms, self._norms = self._norms or self._await(GradientNorms), None
        return wire_forms.host_report(norms).gradients[1]

    def commit(self, learning_rate: float, grad_scale: float) -> None:
        info = self._info
        order = Commit(info.step, info.attempt, learning_rate, grad_scale)
        self._peers.send(1, wire_forms.commit_message(order, {}))
        self._await(Committed)
        self._last_step = info.step

    def abort(self) -> None:
        self._tell(Abort(self._info.step, self._info.attempt))
        self._await(Aborted)
        self._norms = None

    def trainable(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._trainable

    def snapshot(self, *, lasting: bool = False) -> RemoteSnapshot:
        snapshot = RemoteSnapshot(self._part, self._last_step)
        snapshot.part(0)  # from here on the worker keeps it
        return snapshot

    def export(self) -> Iterator[StatePart]:
        return parts_of(lambda number: self._part("export", number, None))

    def _part(self, kind: str, number: int, step: int | None) -> StatePart:
        self._tell(StateRequest(1, kind, number, step))  # type: ignore[arg-type]
        return wire_forms.state_part(self._await(State))

    def load_state(self, kind: str, part: StatePart) -> None:
        self._peers.send(1, wire_forms.part_message(LoadState, 1, kind, 0, part))
        self._await(StateLoaded)

    def _feed(self, k: int, inputs: Tensors, received: Bundle) -> None:
        packed = wire_forms.pack_inputs(inputs)
        self._peers.send(1, wire_forms.inputs_message(self._info, 1, k, packed))
        self._cross(Forward, k, received)

    def _cross(self, kind: type[Body], k: int, tensors: Bundle) -> None:
        self._peers.send(1, boundary_message(kind, self._info, 1, k, *tensors))

    def _tell(self, body: Body) -> None:
        self._peers.send(1, Message(body))

    def _await(self, kind: type[Body]) -> Message:
        deadline = time.monotonic() + WAIT_S
        while True:
            event = self._peers.receive(1.0)
            assert time.monotonic() < deadline, f"no {kind.spec.name}"
            if event is not None:
                if type(event.message.body) is kind:
                    return event.message
                # A worker reports by itself; that may be before what it was asked for.
                assert type(event.message.body) is GradientNorms
                self._norms = event.message

    def _boundary(self, kind: type[Body], stage: int, k: int) -> Bundle:
        message = self._await(kind)
        assert (message.body.stage, message.body.micro_batch) == (stage, k)
        return tuple(map(from_wire, message.tensors))


@contextmanager
def local_stage(config: Config) -> Iterator[Any]:
    [stage] = load_stages(config, config.plan.stages[1:2], open_device("cpu"))
    stage.input_requires_grad = True
    yield stage


@contextmanager
def remote_stage(config: Config) -> Iterator[Any]:
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            serve(config, 1, build=load_stages)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    worker = threading.Thread(target=work, name="worker 1", daemon=True)
    worker.start()
    stage = RemoteStage(config)
    try:
        yield stage
    finally:
        stage.close()
        worker.join(WAIT_S)
        stage_error = ended.get(timeout=WAIT_S)
        if stage_error is not None:
            raise stage_error


Open = Callable[[list[tuple[Any, int, int]]], Any]


@pytest.fixture(params=[local_stage, remote_stage], ids=["local", "remote"])
def stage(request, checkpoint, quick_ticks):
    """`stage(plan)` is the stage with index 1 of that plan; several may be open at once."""
    opened = []

    def open_stage(plan: list[tuple[Any, int, int]]) -> Any:
        context = request.param(make_config(checkpoint, plan))
        opened.append(context)
        return context.__enter__()

    yield open_stage
    for context in reversed(opened):
        context.__exit__(None, None, None)


@pytest.fixture
def middle(checkpoint):
    """The stage of layers 1 and 2 in this process."""
    with local_stage(make_config(checkpoint, MIDDLE)) as opened:
        yield opened


# ---- what is expected of them: the whole model, differentiated by torch alone


class Whole:
    """The uncut model. `run` leaves gradients of two micro-batches in it, added in order."""

    def __init__(self, checkpoint: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.batches = [batch(k) for k in range(2)]
        self.losses: list[float] = []
        # hidden[k][i] enters layer i; its .grad is what goes back over that boundary.
        self.hidden: list[tuple[torch.Tensor, ...]] = []

    def run(self) -> None:
        for inputs in self.batches:
            out = self.model(
                **inputs, output_hidden_states=True, num_items_in_batch=torch.tensor(NUM_ITEMS)
            )
            for hidden_BSD in out.hidden_states:
                hidden_BSD.retain_grad()
            out.loss.backward()
            self.losses.append(out.loss.item())
            self.hidden.append(out.hidden_states)

    def entering(self, k: int, layer: int) -> torch.Tensor:
        return self.hidden[k][layer].detach().clone()

    def gradient(self, k: int, layer: int) -> torch.Tensor:
        gradient_BSD = self.hidden[k][layer].grad
        return gradient_BSD.clone()

    def norms(self, names: list[str]) -> torch.Tensor:
        """Of the gradients of these parameters."""
        parameters = self.parameters(names).values()
        return torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters])

    def parameters(self, names: list[str]) -> dict[str, torch.nn.Parameter]:
        return {name: self.model.get_parameter(name) for name in names}


def batch(k: int) -> Tensors:
    draw = torch.Generator().manual_seed(k)
    ids = torch.randint(3, 300, (2, 7), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 5 + k :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def middle_inputs(k: int) -> Tensors:
    return {"attention_mask": batch(k)["attention_mask"]}


def last_inputs(k: int) -> Tensors:
    return {"attention_mask": batch(k)["attention_mask"], "labels": batch(k)["labels"]}


@pytest.fixture
def whole(checkpoint):
    model = Whole(checkpoint)
    model.run()
    return model


def info(step: int = 0, attempt: int = 0, **more: Any) -> StepInfo:
    more = {"train": True, **more}
    return StepInfo(step, attempt, micro_batches=2, num_items=NUM_ITEMS, **more)


def run_middle(stage: Any, whole: Whole) -> None:
    for k in range(2):
        stage.forward(k, middle_inputs(k), (whole.entering(k, 1),))
    for k in range(2):
        stage.backward(k, (whole.gradient(k, 3),))


def take_step(
    stage: Any, whole: Whole, step: int = 0, learning_rate: float = 1e-2, grad_scale: float = 1.0
) -> None:
    """Of a stage in the middle."""
    stage.begin(info(step))
    run_middle(stage, whole)
    stage.report_gradients()
    stage.commit(learning_rate, grad_scale)


def state(stage: Any) -> Tensors:
    return {name: t for part in checkpoint_of(stage) for name, t in part.tensors.items()}


def weights(stage: Any) -> Tensors:
    found = {tuple(name.split("/", 1)): tensor for name, tensor in state(stage).items()}
    return {name: tensor for (kind, name), tensor in found.items() if kind == "weights"}


# ---- the contract


def test_forward_and_backward_are_the_whole_models(stage, whole):
    tested = stage(MIDDLE)
    tested.begin(info())
    for k in range(2):
        (out_BSD,) = tested.forward(k, middle_inputs(k), (whole.entering(k, 1),))
        assert torch.equal(out_BSD, whole.entering(k, 3))
    for k in range(2):
        (gradient_BSD,) = tested.backward(k, (whole.gradient(k, 3),))
        assert torch.equal(gradient_BSD, whole.gradient(k, 1))


def test_forward_backward_of_the_last_stage_are_the_whole_models(stage, whole):
    tested = stage(LAST)
    tested.begin(info())
    for k in range(2):
        entering = (whole.entering(k, 1),)
        outcome, (gradient_BSD,) = tested.forward_backward(k, last_inputs(k), entering)
        assert outcome.loss == whole.losses[k]
        assert torch.equal(gradient_BSD, whole.gradient(k, 1))


def test_evaluate_sums_token_losses_and_leaves_no_gradient(stage, whole):
    tested = stage(LAST)
    tested.begin(info(train=False))
    for k in range(2):
        total = tested.evaluate(k, last_inputs(k), (whole.entering(k, 1),)).loss
        assert total == pytest.approx(whole.losses[k] * NUM_ITEMS, rel=1e-6)
    # Two micro-batches end an evaluation; the next step's norms know nothing of it.
    tested.begin(info(1))
    for k in range(2):
        tested.forward_backward(k, last_inputs(k), (whole.entering(k, 1),))
    expected = whole.norms([name for name, _ in tested.trainable()])
    assert torch.equal(tested.report_gradients().norms, expected)
    tested.abort()


def test_collect_reports_the_norm_of_each_parameter_in_order(stage, whole):
    tested = stage(MIDDLE)
    tested.begin(info())
    run_middle(tested, whole)
    report = tested.report_gradients()
    names = [name for name, _ in tested.trainable()]
    assert len(names) == 2 * 9
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names)
    assert torch.equal(report.norms, whole.norms(names))
    assert report.nonfinite == ()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda hidden: hidden[:1], "1 x 7 x 32 of float32"),  # torch would repeat the row
        (lambda hidden: hidden[:, :, :1], "2 x 7 x 1 of float32"),
        (lambda hidden: hidden[:, :6], "2 x 6 x 32 of float32"),
        (lambda hidden: hidden[:0], "0 x 7 x 32 of float32"),
        (lambda hidden: hidden[0], "7 x 32 of float32"),
        (lambda hidden: hidden.sum(), "a single number of float32"),
        (lambda hidden: hidden.long(), "2 x 7 x 32 of int64"),
    ],
)
def test_hidden_state_of_another_shape_is_refused_with_both(change, got, checkpoint, whole):
    wrong = change(whole.entering(0, 1))
    text = f"FORWARD of micro-batch 0 for stage 1: the hidden state is {got}, expected 2 x 7 x 32"
    for plan, inputs, name in (
        (MIDDLE, middle_inputs(0), "forward"),
        (LAST, last_inputs(0), "forward_backward"),
        (LAST, last_inputs(0), "evaluate"),
    ):
        with local_stage(make_config(checkpoint, plan)) as tested:
            tested.begin(info(train=name != "evaluate"))
            with pytest.raises(ProtocolError, match=f"^{text}$"):
                getattr(tested, name)(0, inputs, (wrong,))


@pytest.mark.parametrize("change", [lambda g: g[:1], lambda g: g.half(), lambda g: g[:0]])
def test_gradient_of_another_shape_is_refused_with_both(change, middle, whole):
    middle.begin(info())
    middle.forward(0, middle_inputs(0), (whole.entering(0, 1),))
    text = "stage 1: the gradient of micro-batch 0 is .*, expected 2 x 7 x 32 of float32"
    with pytest.raises(ProtocolError, match=text):
        middle.backward(0, (change(whole.gradient(0, 3)),))


def test_collect_names_micro_batches_that_are_not_finite(stage, whole):
    tested = stage(MIDDLE)
    tested.begin(info())
    for k, factor in ((0, 1.0), (1, float("nan"))):
        tested.forward(k, middle_inputs(k), (whole.entering(k, 1) * factor,))
    for k in range(2):
        tested.backward(k, (whole.gradient(k, 3),))
    assert tested.report_gradients().nonfinite == (1,)
    tested.abort()


def test_commit_is_one_step_of_the_optimizer_on_scaled_gradients(stage, whole, checkpoint):
    tested = stage(MIDDLE)
    names = [name for name, _ in tested.trainable()]
    training = make_config(checkpoint, MIDDLE).training
    reference = whole.parameters(names)
    optimizer = build_optimizer(training, whole.model, list(reference.values()))
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    for step in range(2):
        take_step(tested, whole, step, learning_rate=3e-3, grad_scale=0.25)
        # The stage had the same incoming tensors in both steps, but its weights have moved.
        if step == 0:
            for parameter in reference.values():
                parameter.grad.mul_(0.25)
            optimizer.step()
            moved = weights(tested)
            assert list(moved) == names
            for name, parameter in reference.items():
                assert torch.equal(moved[name], parameter.detach())
    assert not torch.equal(weights(tested)[names[0]], moved[names[0]])


def test_abort_leaves_weights_and_forgets_gradients(stage, whole):
    tested = stage(MIDDLE)
    before = weights(tested)
    tested.begin(info())
    run_middle(tested, whole)
    tested.abort()
    # Repeated as attempt 1: the norms are those of a single run, not of two.
    tested.begin(info(attempt=1))
    run_middle(tested, whole)
    expected = whole.norms([name for name, _ in tested.trainable()])
    assert torch.equal(tested.report_gradients().norms, expected)
    tested.abort()
    for name, tensor in weights(tested).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("forget", ["abort", "begin"])
def test_abort_and_begin_each_clear_gradients(middle, whole, forget):
    middle.begin(info())
    run_middle(middle, whole)
    middle.abort() if forget == "abort" else middle.begin(info(1))
    assert torch.count_nonzero(middle.report_gradients().norms) == 0


def test_state_goes_into_a_fresh_stage_that_continues_equally(stage, whole):
    first = stage(MIDDLE)
    take_step(first, whole)
    parts = checkpoint_of(first)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    kinds = {name.partition("/")[0] for part in parts for name in part.tensors}
    assert kinds == {"weights", "optimizer"}

    second = stage(MIDDLE)
    for part in parts:
        second.load_state("checkpoint", part)
    for each in (first, second):
        take_step(each, whole, 1)
    expected = weights(first)
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, expected[name])


def test_a_snapshot_is_of_its_step_despite_later_steps(stage, whole, monkeypatch):
    """Some parts are read while the next step runs, others after it and the one after that have
    been committed: all are what the first step left, to the bit."""
    monkeypatch.setattr(state_snapshot, "STATE_PART_BYTES", 4096)
    tested = stage(MIDDLE)

    def step(number: int) -> None:
        tested.begin(info(number))
        run_middle(tested, whole)
        tested.report_gradients()
        snapshot.keep()
        tested.commit(learning_rate=1e-2, grad_scale=1.0)

    snapshot = tested.snapshot()
    step(0)
    expected = checkpoint_of(tested)
    assert len(expected) > 6
    snapshot = tested.snapshot()
    tested.begin(info(1))
    run_middle(tested, whole)
    found = [snapshot.part(0), snapshot.part(1)]
    tested.report_gradients()
    snapshot.keep()
    tested.commit(learning_rate=1e-2, grad_scale=1.0)
    found += [snapshot.part(2)]
    step(2)
    found += [snapshot.part(number) for number in range(3, len(expected))]
    assert [part.last for part in found] == [part.last for part in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.values == other.values
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    now = checkpoint_of(tested)
    assert not all(torch.equal(t, expected[0].tensors[n]) for n, t in now[0].tensors.items())


def test_export_names_tensors_as_the_checkpoint_does(stage, checkpoint):
    exported = {n: t for part in stage(MIDDLE).export() for n, t in part.tensors.items()}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    own = {n: t for n, t in model.state_dict().items() if ".layers.1." in n or ".layers.2." in n}
    assert exported.keys() == own.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, own[name])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda part: {"weights/no.such": torch.zeros(1)}, "no trainable parameter 'no.such'"),
        (lambda part: dict(list(part.items())[:-1]), "lacks weights of stage 1"),
        (lambda part: {name: t[:1] for name, t in part.items()}, "has shape"),
    ],
    ids=["unknown", "absent", "shape"],
)
def test_load_state_refuses_tensors_that_do_not_fit(middle, change, text):
    [part] = checkpoint_of(middle)
    with pytest.raises(CheckpointError, match=text):
        middle.load_state("checkpoint", StatePart(change(part.tensors), last=True))


# ---- the same bits under every cut, with everything that computes otherwise switched on

PLANS = [[(0, 4)], [(0, 1), (1, 3), (3, 4)], [(0, 0), (0, 4), (4, 4)]]
LORA = {"r": 2, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.3}
WAYS: dict[str, dict[str, Any]] = {
    "pieces": {"training": {"loss_chunk_tokens": 4}},
    "pieces of rows": {"training": {"loss_chunk_tokens": 9, "bf16": True}},
    "pieces, tied": {"training": {"loss_chunk_tokens": 5}, "tied": True},
    "pieces, head adapted": {"training": {"loss_chunk_tokens": 5}, "adapter": LORA},
    "all bfloat16": {"training": {"loss_chunk_tokens": 5}, "model": {"dtype": "bfloat16"}},
    "recomputing": {"training": {"loss_chunk_tokens": 5}, "adapter": LORA, "again": True},
    "tied blocks": {"blocks": True},
    "tied blocks, recomputing": {"blocks": True, "again": True},
    "compiled": {"training": {"torch_compile_backend": "eager"}, "again": True},
}


def fixture_of(way: str) -> str:
    blocks = "tied_blocks" if WAYS[way].get("blocks") else "checkpoint"
    return "tied_checkpoint" if WAYS[way].get("tied") else blocks


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("tied"), layers=LAYERS, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def tied_blocks(tmp_path_factory):
    """All layers have one transformer in common."""
    kinds = ["hybrid"] * LAYERS
    changes = {"num_hidden_layers": LAYERS, "layers_block_type": kinds}
    changes["hybrid_layer_ids"] = list(range(LAYERS))
    return save_tiny("zamba2", tmp_path_factory.mktemp("tied blocks"), **changes)


class Chain:
    """The stages of a plan in this process, run as the engine runs them."""

    def __init__(
        self, checkpoint: Path, bounds: list[tuple[int, int]], way: dict[str, Any]
    ) -> None:
        owners = ["local", 1, "local"]
        plan = [(owners[i], start, end) for i, (start, end) in enumerate(bounds)]
        raw = make_config(checkpoint, plan).to_dict()
        raw["model"].update(way.get("model", {}))
        raw["training"].update(way.get("training", {}))
        raw["adapter"] = way.get("adapter")
        for index, entry in enumerate(raw["shard_plan"]):
            # Every second stage: what one does must not matter to the others.
            entry["gradient_checkpointing"] = way.get("again", False) and index % 2 == 0
        config = Config.from_dict(raw)
        self.stages = load_stages(config, config.plan.stages, open_device("cpu"))
        trained = [stage.trainable() for stage in self.stages]
        needs = [any(trained[:stage]) for stage in range(len(trained))]
        for stage, needed in zip(self.stages, needs, strict=True):
            stage.input_requires_grad = needed

    def step(self, *, train: bool = True) -> tuple[list[float], Tensors]:
        """Losses of two micro-batches and, after a training step, all gradients by name."""
        for stage in self.stages:
            stage.begin(info(train=train))
        losses = [self._micro_batch(k, train) for k in range(2)]
        self.report()
        gradients = {}
        for stage in self.stages:
            for name, parameter in stage._parameters:
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.clone()
        return losses, gradients

    def report(self, given: dict[int, Tensors] | None = None) -> None:
        """Sum what is tied, of what the stages give or are said to give, and take norms."""
        trained = {stage.index: [n for n, _ in stage.trainable()] for stage in self.stages}
        ties = Ties({stage.index: stage.ties for stage in self.stages}, trained)
        tied = TiedGradients(ties)
        for stage in self.stages:
            parts = [part.tensors for part in stage.gradients()] if given is None else []
            for tensors in parts if given is None else [given[stage.index]]:
                tied.take(stage.index, tensors, last=True)
        assert tied.waiting == []
        for k in ties.holders:
            assert self.stages[k].awaits_sums
            self.stages[k].load_state("tied gradients", StatePart(tied.sums(k), last=True))
        for stage in self.stages:
            stage.report_gradients()

    def _micro_batch(self, k: int, train: bool) -> float:
        crossing: Bundle = ()
        for stage in self.stages[:-1]:
            crossing = stage.forward(k, batch(k), crossing)
        if not train:
            return float(self.stages[-1].evaluate(k, batch(k), crossing).loss)
        outcome, gradients = self.stages[-1].forward_backward(k, batch(k), crossing)
        for stage in reversed(self.stages[:-1]):
            gradients = stage.backward(k, gradients) if stage.differentiates else ()
        return float(outcome.loss)


def same_bits(
    path: Path, cuts: list[list[tuple[int, int]]], way: dict[str, Any]
) -> tuple[list[float], Tensors, list[float]]:
    """The losses, gradients and evaluated losses under the first cut; the others have the same."""
    results = []
    for bounds in cuts:
        chain = Chain(path, bounds, way)
        results.append((chain.step(), chain.step(train=False)[0]))
    (losses, gradients), evaluated = results[0]
    for (other_losses, other), other_evaluated in results[1:]:
        assert (other_losses, other_evaluated) == (losses, evaluated)
        assert other.keys() == gradients.keys()
        assert [n for n in other if not torch.equal(other[n], gradients[n])] == []
    return losses, gradients, evaluated


def test_micro_batches_behind_another_replicas_draw_as_in_one_step(checkpoint):
    def gradients(first: int, k: int) -> torch.Tensor:
        (stage,) = Chain(checkpoint, PLANS[0], {"adapter": LORA}).stages
        stage.begin(info(first_micro_batch=first))
        stage.forward_backward(k, batch(0), ())
        found = [parameter.grad for _, parameter in stage._parameters]
        return torch.cat([grad.flatten() for grad in found if grad is not None])

    assert torch.equal(gradients(1, 0), gradients(0, 1))
    assert not torch.equal(gradients(1, 0), gradients(0, 0))


def test_statistics_of_a_forgotten_step_are_put_back(checkpoint):
    (stage,) = Chain(checkpoint, PLANS[0], {}).stages
    means = torch.zeros(2)
    stage._statistics = {"mean": means}
    for decide, kept in ((stage.abort, 0.0), (lambda: stage.commit(0.1, 1.0), 1.0)):
        stage.begin(info())
        means += 1.0
        decide()
        stage.abort()
        assert means.tolist() == [kept] * 2


# torch silences this warning while it compiles, which "warnings are errors" overrules.
quiet_compiler = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@quiet_compiler
@pytest.mark.parametrize("way", seldom(WAYS, "tied blocks"))
def test_every_way_of_computing_has_the_same_bits_under_every_cut(way, request):
    path = request.getfixturevalue(fixture_of(way))
    assert same_bits(path, PLANS, WAYS[way])[1]


ONE_PIECE = {"training": {"loss_chunk_tokens": None}}
DROPPING = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.3}
SIDE_WAYS: dict[str, dict[str, Any]] = {
    "all weights": ONE_PIECE,
    "recomputing": {**ONE_PIECE, "again": True},
    "adapter": {**ONE_PIECE, "adapter": DROPPING, "again": True},
    # Nothing before layer 4 is trained: no gradient goes back for what was made there.
    "upper layers": {
        **ONE_PIECE, "adapter": {"r": 2, "target_modules": r".*layers\.[45]\..*o(ut)?_proj"}
    },
}  # fmt: skip


LONGER = ("gemma3n_text", "gemma4_text", "qwen4_exp_text", "zaya")


@pytest.mark.parametrize("way", seldom(SIDE_WAYS, "recomputing", "upper layers"))
@pytest.mark.parametrize("model_type", seldom(("hy_v4", *LONGER), *LONGER))
def test_side_tensors_change_no_bit_of_a_cut(model_type, way, tmp_path):
    path = save_tiny(model_type, tmp_path / model_type)
    cuts = [[(0, 6)], [(0, 1), (1, 4), (4, 6)], [(0, 0), (0, 3), (3, 6)]]
    assert same_bits(path, cuts, SIDE_WAYS[way])[1]


@pytest.mark.parametrize("way", seldom(SIDE_WAYS, "recomputing", "upper layers"))
def test_the_loss_of_routers_has_the_same_bits_under_every_cut(way, tmp_path):
    path = save_tiny("mixtral", tmp_path / "mixtral")
    model = {"router_aux_loss_coef": 0.5}
    # A router that an adapter trains through its own weight, beside the layers.
    adapter = SIDE_WAYS[way].get("adapter")
    if adapter is not None and way == "adapter":
        targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
        adapter = {**adapter, **targets, "lora_dropout": 0.0}
    with_routers = {**SIDE_WAYS[way], "model": model, "adapter": adapter}
    cuts = [[(0, 6)], [(0, 1), (1, 4), (4, 6)], [(0, 0), (0, 6), (6, 6)]]
    losses, gradients, evaluated = same_bits(path, cuts, with_routers)
    assert any("gate" in name for name in gradients) or way == "upper layers"
    # Training has the routers' share of each micro-batch, evaluation the token losses alone.
    without = Chain(path, [(0, 6)], {**with_routers, "model": {"router_aux_loss_coef": 0.0}})
    plain, _ = without.step()
    assert all(loss - other > 0.5 for loss, other in zip(losses, plain, strict=True))
    assert evaluated == without.step(train=False)[0]


def test_side_tensors_are_checked_before_anything_is_computed(tmp_path):
    path = save_tiny("gemma3n_text", tmp_path / "model")
    first, middle, last = Chain(path, [(0, 1), (1, 4), (4, 6)], SIDE_WAYS["all weights"]).stages
    for tested in (first, middle, last):
        tested.begin(info())
    hidden, side, *others = first.forward(0, batch(0), ())
    wrong = side[:, :3].detach().requires_grad_()
    text = (
        "FORWARD of micro-batch 0 for stage 1: per_layer_input is 2 x 3 x 16 of float32"
        " that wants a gradient, expected 2 x 7 x 16 of float32 that wants a gradient"
    )
    middle._shard.forward = last._shard.forward = pytest.fail
    with pytest.raises(ProtocolError, match=f"^{text}$"):
        middle.forward(0, middle_inputs(0), (hidden, wrong, *others))
    for name in ("forward_backward", "evaluate"):
        last.begin(info(train=name != "evaluate"))
        with pytest.raises(ProtocolError, match=r"FORWARD of .* stage 2: 2 tensors came, exp"):
            getattr(last, name)(0, last_inputs(0), (hidden, side))


@pytest.mark.parametrize(
    "change",
    [
        lambda side: [side[:1]],
        lambda side: [side.half()],
        lambda side: [side.clone().requires_grad_()],
        lambda side: [],
    ],
)
def test_gradients_of_side_tensors_are_checked(change, tmp_path):
    path = save_tiny("gemma3n_text", tmp_path / "model")
    first = Chain(path, [(0, 1), (1, 4), (4, 6)], SIDE_WAYS["all weights"]).stages[0]
    first.begin(info())
    hidden, side, *others = map(torch.zeros_like, first.forward(0, batch(0), ()))
    text = "stage 0: the gradient of micro-batch 0 is .*, expected 4 x 2 x 7 x 64 of float32, 2 x 7"
    with pytest.raises(ProtocolError, match=text):
        first.backward(0, (hidden, *change(side), *others))


@quiet_compiler
@pytest.mark.parametrize("way", seldom(("pieces", "pieces, tied", "compiled"), "compiled"))
def test_other_ways_of_computing_change_nothing_but_rounding(way, request):
    path = request.getfixturevalue(fixture_of(way))
    plain = Chain(path, PLANS[1], {"training": {"loss_chunk_tokens": None}})
    other = Chain(path, PLANS[1], WAYS[way])
    (losses, gradients), (other_losses, other_gradients) = plain.step(), other.step()
    assert other_losses == pytest.approx(losses, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient)
    assert other.step(train=False)[0] == pytest.approx(plain.step(train=False)[0], rel=1e-6)


def test_a_compiler_that_does_not_work_is_a_clear_error(checkpoint):
    way = {"training": {"torch_compile_backend": "no_such"}}
    with pytest.raises(DeviceError, match="'no_such' does not work on") as caught:
        Chain(checkpoint, PLANS[0], way)
    assert "training.torch_compile to false" in str(caught.value)


def test_a_loss_scale_scales_the_gradients_of_pieces(checkpoint):
    chain = Chain(checkpoint, PLANS[0], WAYS["pieces"])
    _, expected = chain.step()
    [stage] = chain.stages
    scaled = StepInfo(0, 0, True, micro_batches=2, num_items=NUM_ITEMS, loss_scale=1024.0)
    stage.begin(scaled)
    for k in range(2):
        stage.forward_backward(k, batch(k), ())
    largest = max(float(p.grad.abs().max()) for _, p in stage._parameters if p.grad is not None)
    assert largest == 1024 * max(float(g.abs().max()) for g in expected.values())
    stage.report_gradients()
    for name, parameter in stage._parameters:
        assert torch.equal(parameter.grad, expected[name])


@pytest.mark.parametrize("adapter", [None, {"r": 4, "target_modules": "all-linear"}])
def test_dropped_stage_frees_its_weights_without_the_garbage_collector(adapter, checkpoint):
    config = make_config(checkpoint, MIDDLE)
    raw = {**config.to_dict(), "adapter": adapter}
    raw["training"] = {**raw["training"], "gradient_checkpointing": True}
    config = Config.from_dict(raw)
    [stage] = load_stages(config, config.plan.stages[1:2], open_device("cpu"))
    stage.input_requires_grad = True
    stage.begin(info())
    (out_BSD,) = stage.forward(0, middle_inputs(0), (torch.randn(2, 7, 32),))
    stage.backward(0, (torch.ones_like(out_BSD),))
    stage.report_gradients()
    stage.commit(1e-3, 1.0)
    weights = [weakref.ref(parameter) for parameter in stage._shard.model.parameters()]
    gc.collect()  # what importing and loading left
    gc.disable()
    try:
        del stage, out_BSD
        assert [weight() for weight in weights] == [None] * len(weights)
    finally:
        gc.enable()


# ---- gradients that are summed with those of other replicas


def summed(stage: Any, factor: float = 2.0) -> Tensors:
    """The stage's own gradients; it is given `factor` times as much, as a group would."""
    own = {n: t.clone() for part in stage.gradients() for n, t in part.tensors.items()}
    stage.load_state("gradients", StatePart({n: t * factor for n, t in own.items()}, last=True))
    return own


def test_sums_take_the_place_of_the_gradients(middle, whole):
    middle.begin(info(summed=True))
    run_middle(middle, whole)
    alone = middle.report_gradients().norms
    middle.begin(info(summed=True))
    run_middle(middle, whole)
    own = summed(middle)
    assert list(own) == [name for name, _ in middle.trainable()]
    assert torch.equal(middle.report_gradients().norms, alone * 2)


def test_a_parameter_without_gradient_in_any_replica_has_none(middle, whole):
    middle.begin(info(summed=True))
    run_middle(middle, whole)
    (first, parameter), (second, other) = middle._parameters[:2]
    parameter.grad = None
    assert first not in {n for part in middle.gradients() for n in part.tensors}
    middle.load_state("gradients", StatePart({second: torch.ones_like(other)}, last=True))
    norms = middle.report_gradients().norms
    assert float(norms[0]) == 0.0
    assert float(norms[1]) == pytest.approx(other.numel() ** 0.5)
    before = parameter.detach().clone()
    middle.commit(0.1, 1.0)
    assert torch.equal(parameter, before)


def test_a_gradient_that_only_another_replica_has_is_taken(middle):
    """An island without samples of the step has no gradient at all."""
    middle.begin(info(summed=True))
    assert [part.tensors for part in middle.gradients()] == [{}]
    name, parameter = middle._parameters[0]
    middle.load_state("gradients", StatePart({name: torch.ones_like(parameter)}, last=True))
    assert float(middle.report_gradients().norms[0]) == pytest.approx(parameter.numel() ** 0.5)


@pytest.mark.parametrize("bounds", [[(0, 4)], [(0, 2), (2, 4)]])
def test_both_ends_of_a_tied_weight_are_summed_by_themselves(tied_checkpoint, bounds):
    """Twice each share is twice the tied gradient, to the bit, wherever the ends live."""
    chain = Chain(tied_checkpoint, bounds, {})
    _, alone = chain.step()
    for stage in chain.stages:
        stage.begin(info(summed=True))
    for k in range(2):
        chain._micro_batch(k, True)
    own = {stage.index: summed(stage) for stage in chain.stages}
    assert "lm_head.weight" in own[len(bounds) - 1]
    assert "model.embed_tokens.weight" in own[0]
    chain.report({k: {n: 2 * t for n, t in tensors.items()} for k, tensors in own.items()})
    found = {name: p.grad for stage in chain.stages for name, p in stage._parameters}
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], 2 * gradient) for name, gradient in alone.items())


EARLY: dict[str, dict[str, Any]] = {
    "all weights": {},
    "chunks": {"training": {"loss_chunk_tokens": 5}},
    "chunks, bfloat16": {"training": {"loss_chunk_tokens": 5}, "model": {"dtype": "bfloat16"}},
    "adapter": {"adapter": LORA, "again": True},
    "compiled": {"training": {"torch_compile_backend": "eager"}, "again": True},
}


@quiet_compiler
@pytest.mark.parametrize("way", EARLY)
@pytest.mark.parametrize("bounds", [[(0, 4)], [(0, 2), (2, 4)]])
def test_gradients_that_are_given_early_are_those_of_the_step(checkpoint, bounds, way, monkeypatch):
    """Each once, early or at the end; final when it is given."""
    monkeypatch.setattr("hetero_framework.engine.stage.EARLY_PART_BYTES", 1)
    chain = Chain(checkpoint, bounds, EARLY[way])
    _, alone = chain.step()
    found: Tensors = {}

    class Taker:
        def has_room(self) -> bool:
            return True

        def take(self, given: GradientPart) -> None:
            gradients = given.part.tensors
            assert not found.keys() & gradients.keys()
            found.update({name: gradient.clone() for name, gradient in gradients.items()})

    for stage in chain.stages:
        stage.begin(info(summed=True), Taker())
    chain._micro_batch(0, True)
    assert not found
    chain._micro_batch(1, True)
    early = set(found)
    outside = {n for n in alone if ".layers." not in n}
    assert early >= alone.keys() - outside
    assert early >= outside or "chunks" in way
    assert "model.norm.weight" not in early or "chunks" not in way
    for stage in chain.stages:
        for part in stage.gradients():
            Taker().take(GradientPart(stage.index, 0, part))
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in alone.items())


@pytest.mark.parametrize("kind", ["gradients", "weights"])
@pytest.mark.parametrize("change", [lambda n, t: {f"{n}x": t}, lambda n, t: {n: t[:1]}])
def test_state_of_an_unknown_parameter_is_refused(middle, kind, change):
    name, parameter = next((n, p) for n, p in middle._parameters if p.dim() == 2)
    part = StatePart(change(name, parameter.detach()), last=True)
    with pytest.raises(ProtocolError, match=r"stage 1 trains no .* of shape"):
        middle.load_state(kind, part)


def test_other_weights_leave_the_optimizer_as_it_is(middle, whole):
    take_step(middle, whole)
    before = state(middle)
    name, parameter = middle._parameters[0]
    middle.load_state("weights", StatePart({name: torch.zeros_like(parameter)}, last=True))
    after = state(middle)
    assert not after[f"weights/{name}"].any()
    assert all(torch.equal(t, before[n]) for n, t in after.items() if n != f"weights/{name}")


# ---- gradients that are given while their backward runs


class Model:
    """Three layers; `happened` is what was given, and when the backward came to the first layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.early = EarlyGradients(
            3, [(name[0], p) for name, p in self.layers.named_parameters()], list
        )
        self.happened: list[object] = []
        self.room = True
        self.given: Tensors = {}

    def backward(self) -> None:
        hidden = self.layers[0](torch.randn(2, 4))
        hidden.register_hook(lambda gradient: self.happened.append("first layer"))
        self.layers[1:](hidden).sum().backward()

    def last_backward(self) -> None:
        """Of a step that begins now and whose gradients are given early."""
        self.early.begin(self)
        with self.early.last_backward():
            self.backward()

    def has_room(self) -> bool:
        return self.room

    def take(self, found: GradientPart) -> None:
        assert (found.stage, found.number, found.part.last) == (3, 0, False)
        self.happened.append(list(found.part.tensors))
        self.given |= {name: gradient.clone() for name, gradient in found.part.tensors.items()}

    def gradients(self) -> Tensors:
        return {name[0]: p.grad for name, p in self.layers.named_parameters() if p.grad is not None}


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("hetero_framework.engine.stage.EARLY_PART_BYTES", 1)
    return Model()


def test_last_layers_gradients_are_given_before_the_first_layers_backward(model):
    model.early.begin(model)
    model.backward()
    assert model.happened == ["first layer"]  # more is to come
    with model.early.last_backward():
        model.backward()
    assert model.happened[1:] == [["2"], ["1"], "first layer", ["0"]]
    assert model.early.given == {"0", "1", "2"}
    found = model.gradients()
    assert all(torch.equal(model.given[name], found[name]) for name in "012")
    model.early.begin(None)
    model.backward()  # of the next step
    assert len(model.happened) == 6


def test_small_gradients_are_given_together_in_full_parts_only(model, monkeypatch):
    monkeypatch.setattr("hetero_framework.engine.stage.EARLY_PART_BYTES", 2 * 4 * 4 * 4)
    for _ in range(2):
        model.early.begin(model)
        assert model.early.given == set()
        with model.early.last_backward():
            model.backward()
        assert model.early.given == {"1", "2"}
    assert model.happened == [["2", "1"], "first layer"] * 2


def test_gradients_wait_for_room_and_are_given_together(model):
    model.room = False
    found = model.layers[0].weight.register_hook(lambda gradient: setattr(model, "room", True))
    model.last_backward()
    assert model.happened == ["first layer", ["2", "1", "0"]]
    found.remove()
    model.room = False
    model.last_backward()
    assert model.early.given == set()  # they are left for the stage's end


def test_late_gradients_are_not_given_early(model):
    model.early.begin(model)
    with model.early.last_backward(late=["2"]):
        model.backward()
        model.layers[2](torch.randn(2, 4)).sum().backward()  # as chunks of the loss do
    assert model.given.keys() == {"0", "1"}


def test_a_gradient_that_changes_after_it_was_given_ends_the_step(model):
    model.last_backward()
    with pytest.raises(AssertionError, match="the gradient of 2 grows after others have it"):
        model.backward()  # of an earlier micro-batch


def test_early_gradients_are_optional(model):
    model.early.begin(None)
    with model.early.last_backward():
        model.backward()
    assert model.early.given == set()
    assert not any(p._post_accumulate_grad_hooks for p in model.layers.parameters())


def test_a_failing_backward_leaves_nothing(model, monkeypatch):
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    model.early.begin(model)
    hook = model.layers[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), model.early.last_backward():
        model.backward()
    hook.remove()
    assert model.happened == [["2"], ["1"], "first layer"]
    model.early.begin(model)
    model.backward()
    assert model.happened[3:] == ["first layer"]
    with model.early.last_backward():
        model.backward()
    assert model.happened[4:] == [["2"], ["1"], "first layer", ["0"]]


def test_closed_early_gradients_take_no_gradient(model):
    model.early.begin(model)
    model.early.close()
    with model.early.last_backward():
        model.backward()
    assert model.given == {}


def test_hooks_keep_nothing_alive(model):
    gc.disable()
    try:
        model.early.begin(Model())
        gone = weakref.ref(model.early)
        del model.early
        assert gone() is None
    finally:
        gc.enable()
