from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hetero_framework.config import WireConfig
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.frames import PREFIX_BYTES, parse_prefix
from hetero_framework.core.messages import (
    Backward,
    Body,
    BoundaryTensor,
    Coded,
    Commit,
    Forward,
    Message,
    SideForm,
    encode,
    read_header,
)
from hetero_framework.core.spans import RECEIVE, Recorder
from hetero_framework.core.tensors import from_wire, to_wire
from hetero_framework.engine import wire_forms
from hetero_framework.engine.boundary_io import (
    ArrivalMeter,
    BoundaryIO,
    Done,
    Sender,
    alone_s,
    move_in,
    unpack,
)
from hetero_framework.engine.expectation import Expectation
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.stage_api import Arrival, Outcome, StepInfo
from hetero_framework.errors import PeerLostError, ProtocolError
from hetero_framework.models.cut.side import Bundle
from tests.installed import needs
from tests.samples import boundary_message
from tests.unit.device_helpers import OneThreadDevice, QueuedDevice
from tests.waiting import WAIT_S

INFO = StepInfo(step=3, attempt=1, train=True, micro_batches=4, num_items=8)
KINDS = [Forward, Backward]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def hidden(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(shape or (2, 5, 13), generator=draw).to(dtype)


def sides() -> Bundle:
    """Side tensors of one that wants a gradient and two that do not."""
    wants = hidden(torch.float32, 2, 5, 3).requires_grad_()
    return wants, torch.arange(7), hidden(torch.bfloat16, 3)


class Received:
    """A message as a link hands it over: its tensors lie in a buffer that is to be given back."""

    def __init__(self, message: Message) -> None:
        frame = b"".join(encode(message))
        header_bytes, payload_bytes = parse_prefix(frame[:PREFIX_BYTES])
        end = PREFIX_BYTES + header_bytes
        head = read_header(frame[:PREFIX_BYTES], frame[PREFIX_BYTES:end], payload_bytes)
        self.buffer = bytearray(frame[end:])
        self.released = 0
        self.message = head.attach(self.buffer, self._release)

    def _release(self) -> None:
        self.released += 1
        self.buffer[:] = b"\x55" * len(self.buffer)  # the next frame comes into the same memory


def only(arrival: Any) -> torch.Tensor:
    """The one tensor of an arrival."""
    assert isinstance(arrival, Arrival)
    (tensor,) = arrival.tensors
    return tensor


@pytest.fixture(params=["cpu", "queued", "queued without bfloat16"])
def device(request):
    if request.param == "cpu":
        return open_device("cpu")
    return QueuedDevice(at_once=True, bfloat16="without" not in request.param)


# ---- unpacking


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.spec.name)
def test_unpack_tensor_as_it_is_and_give_its_buffer_back(kind, device):
    """On the CPU the tensor lies in the buffer, which goes back with it; elsewhere the buffer is
    free when the tensor is on its device."""
    sent = hidden()
    received = Received(boundary_message(kind, INFO, 1, 0, sent))
    arrival = unpack(received.message, device)
    assert torch.equal(only(arrival), sent)
    assert received.released == (1 if device.is_async else 0)
    arrival.release()
    assert received.released == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, codec in CODECS.items() for dtype in DTYPES if codec.supports(dtype)],
    ids=str,
)
def test_unpack_coded_tensor_into_own_memory(name, dtype, device):
    codec, sent = CODECS[name], hidden(dtype)
    coded = Coded(name, tuple(sent.shape), str(dtype).removeprefix("torch."))
    message = boundary_message(Forward, INFO, 1, 0, *codec.encode(sent), coded=coded)
    received = Received(message)
    arrival = unpack(received.message, device)
    assert received.released == 1
    assert only(arrival).dtype == dtype
    assert torch.equal(only(arrival), codec.decode(codec.encode(sent), sent.shape, dtype))
    arrival.release()
    assert received.released == 1


@needs("codecs")
@pytest.mark.parametrize("codec", [None, "int8"])
def test_only_the_computing_thread_copies_to_a_device_of_one_thread(codec):
    device, sent = OneThreadDevice(at_once=True), hidden()
    if codec is None:
        message, expected = boundary_message(Forward, INFO, 1, 0, sent), sent
    else:
        parts = CODECS[codec].encode(sent)
        coded = Coded(codec, tuple(sent.shape), "float32")
        message = boundary_message(Forward, INFO, 1, 0, *parts, coded=coded)
        expected = CODECS[codec].decode(parts, sent.shape, torch.float32)
    received = Received(message)
    unpacked = unpack(received.message, device)
    assert device.copied_in_by == []
    arrived = only(move_in(device, unpacked))
    assert len(device.copied_in_by) == received.released == 1
    assert torch.equal(arrived, expected)


def test_inputs_for_a_device_of_one_thread_are_copied_by_that():
    device = OneThreadDevice(at_once=True)
    inputs = {"labels": torch.tensor([[1, -100, 3]])}
    received = Received(wire_forms.inputs_message(INFO, 1, 0, wire_forms.pack_inputs(inputs)))
    unpacked = unpack(received.message, device)
    assert (device.copied_in_by, received.released) == ([], 1)
    moved = move_in(device, unpacked)
    assert len(device.copied_in_by) == 1
    assert torch.equal(moved["labels"], inputs["labels"])


def test_unpack_inputs_into_memory_of_their_own(device):
    inputs = {
        "labels": torch.tensor([[1, -100, 3]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "pixels": hidden(),
    }
    received = Received(wire_forms.inputs_message(INFO, 1, 0, wire_forms.pack_inputs(inputs)))
    found = unpack(received.message, device)
    assert received.released == 1
    assert found.keys() == inputs.keys()
    for name, tensor in inputs.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_unpack_leaves_other_messages_alone(device):
    received = Received(wire_forms.commit_message(Commit(3, 1, 1e-3, 1.0), {"embed": hidden()}))
    assert unpack(received.message, device) is None
    assert received.released == 0
    assert len(received.message.tensors) == 1


@needs("codecs")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"codec": "zip"}, "FORWARD: cannot read codec 'zip'"),
        ({"dtype": "int3"}, "cannot read codec 'int8' of a 'int3' tensor"),
        ({"shape": (9, 9)}, r"a tensor of \(9, 9\) torch.float32 comes as"),
        ({"codec": "bf16"}, "1 tensors expected, got 2"),
    ],
)
def test_unpack_refuses_malformed_coded_tensors(change, text):
    sent = hidden()
    coded = replace(Coded("int8", tuple(sent.shape), "float32"), **change)
    message = boundary_message(Forward, INFO, 1, 0, *CODECS["int8"].encode(sent), coded=coded)
    with pytest.raises(ProtocolError, match=text):
        unpack(Received(message).message, open_device("cpu"))


@pytest.mark.parametrize("cause", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_unpack_without_memory_is_no_fault_of_the_link(cause):
    class Full(QueuedDevice):
        def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
            raise cause

    message = Received(boundary_message(Forward, INFO, 2, 1, hidden())).message
    with pytest.raises(StepOutOfMemory, match="stage 2, FORWARD of micro-batch 1") as caught:
        unpack(message, Full())
    assert caught.value.attempt == (INFO.step, INFO.attempt)


# ---- the sender


@pytest.fixture
def failures():
    return []


@pytest.fixture
def sender(failures):
    sender = Sender(failures.append, WAIT_S)
    yield sender
    sender.close()


def test_sender_does_jobs_in_order_and_flush_waits_for_them(sender):
    done: list[int] = []
    go = threading.Event()

    def first() -> None:
        assert go.wait(WAIT_S)
        done.append(0)

    sender.submit(first)
    for k in range(1, 20):
        sender.submit(partial(done.append, k))
    assert done == []
    go.set()
    sender.flush()
    assert done == list(range(20))


def test_sender_that_hangs_does_not_hold_flush_up_for_ever(failures):
    go = threading.Event()
    sender = Sender(failures.append, flush_timeout_s=0.01)
    sender.submit(lambda: bool(go.wait(WAIT_S)))
    with pytest.raises(PeerLostError, match="could not be sent within"):
        sender.flush()
    go.set()
    sender.close()


def test_flush_waits_in_slices_so_that_ctrl_c_is_heard_on_windows(sender, monkeypatch):
    """There nothing interrupts a wait without an end (L13)."""
    waits: list[float | None] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout)
        return wait(event, timeout)

    sender.submit(lambda: None)
    monkeypatch.setattr(threading.Event, "wait", noted)
    sender.flush()
    assert waits
    assert all(wait is not None and wait <= 0.5 for wait in waits)


def test_sender_goes_on_after_a_job_that_fails(sender, failures):
    error, done = ProtocolError("too large"), []

    def fail() -> None:
        raise error

    sender.submit(fail)
    sender.submit(lambda: done.append(1))
    sender.flush()
    assert failures == [error]
    assert done == [1]


def test_sender_without_a_job_has_no_thread(sender):
    before = threading.active_count()
    sender.flush()
    assert threading.active_count() == before
    sender.close()


def test_sender_finishes_its_jobs_when_it_is_closed(sender):
    done: list[int] = []
    sender.submit(lambda: done.append(1))
    sender.close()
    assert done == [1]
    assert "sender" not in {thread.name for thread in threading.enumerate()}
    sender.close()


# ---- what leaves the stages


class Wire:
    """The outlet of a process: writes down everything that leaves, in order."""

    def __init__(self) -> None:
        self.left: list[tuple[Any, ...]] = []
        self.sent: list[tuple[int, Message, Done | None]] = []
        self.outcomes: list[Outcome] = []
        self.failures: list[Exception] = []
        self.threads: list[str] = []
        self.breaks: Exception | None = None

    def post(self, message: Message, done: Done | None = None) -> None:
        if self.breaks is not None:
            raise self.breaks
        stage = message.expect(BoundaryTensor).stage
        self.threads.append(threading.current_thread().name)
        self.sent.append((stage, message, done))
        self.left.append((message.name, stage, message.body.micro_batch))

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        assert info == INFO
        self.outcomes.append(outcome)
        self.left.append(("LOSS", micro_batch, outcome.loss))

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        assert info == INFO
        self.left.append(("BACKWARD_DONE", micro_batch))

    def failed(self, error: Exception) -> None:
        self.failures.append(error)

    def tensor(self, index: int = -1) -> torch.Tensor:
        """What arrives of a message that was posted."""
        return only(unpack(self.sent[index][1], open_device("cpu")))


Opened = tuple[BoundaryIO, Wire]


@pytest.fixture
def opened(request):
    """`opened(device, activations=..., gradients=..., awaited=...)`: the boundary I/O of a process
    with stage 1."""
    made: list[BoundaryIO] = []

    def make(device: Device, *, awaited: bool = True, **codecs: Any) -> Opened:
        wire, options = Wire(), {"outcome_is_awaited": awaited, "flush_timeout_s": WAIT_S}
        io = BoundaryIO(device, WireConfig(**codecs), wire, Expectation([]), **options)
        made.append(io)
        return io, wire

    yield make
    for io in made:
        io.close()


def test_boundary_io_of_the_cpu_sends_in_the_computing_thread_without_copying(opened):
    io, wire = opened(open_device("cpu"))
    tensor = hidden()
    io.send(Forward(3, 1, 2, 0), (tensor,))
    io.send(Backward(3, 1, 0, 1), (tensor,))
    io.outcome(INFO, 1, Outcome(torch.tensor(2.5)))
    io.finished(INFO, 1)
    tensors = [("FORWARD", 2, 0), ("BACKWARD", 0, 1)]
    assert wire.left == [*tensors, ("LOSS", 1, 2.5), ("BACKWARD_DONE", 1)]
    assert wire.threads == [threading.current_thread().name] * 2
    assert from_wire(wire.sent[0][1].tensors[0]).data_ptr() == tensor.data_ptr()
    assert wire.sent[0][2] is None


@needs("codecs")
@pytest.mark.parametrize("name", ["none", "bf16", "int8"])
def test_boundary_io_sends_a_bundle_in_one_message(opened, device, name):
    io, wire = opened(device, activations=name, gradients="none")
    sent = (hidden(), *sides())
    io.send(Forward(3, 1, 2, 1), sent)
    io.flush()
    [(_, message, _)] = wire.sent
    arrival = unpack(Received(message).message, open_device("cpu"))
    assert [t.requires_grad for t in arrival.tensors] == [False, True, False, False]
    for found, tensor in zip(arrival.tensors, sent, strict=True):
        codec = CODECS[name if tensor.is_floating_point() else "none"]
        decoded = codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)
        assert torch.equal(found.detach(), decoded)


@pytest.mark.parametrize(
    ("forms", "text"),
    [
        ([], "1 tensors expected, got 2"),
        ([SideForm(True)], "a gradient for a tensor of torch.int64"),
    ],
)
def test_a_bundle_that_contradicts_its_forms_is_refused(forms, text):
    body = Forward(3, 1, 1, 0, sides=tuple(forms) or None)
    message = Message(body, [to_wire(hidden()), to_wire(torch.arange(3))])
    with pytest.raises(ProtocolError, match=text):
        unpack(Received(message).message, open_device("cpu"))


@needs("codecs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none", "bf16", "int8"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.spec.name)
def test_boundary_io_sends_encoded_tensors(opened, device, kind, name, dtype):
    # The other direction has another codec.
    names = {"activations": "none", "gradients": "none"}
    names["activations" if kind is Forward else "gradients"] = name
    io, wire = opened(device, **names)
    tensor = hidden(dtype)
    io.send(Forward(3, 1, 2, 1), (tensor,))
    io.send(Backward(3, 1, 2, 1), (tensor,))
    io.flush()
    [message] = [message for _, message, _ in wire.sent if type(message.body) is kind]
    if name == "bf16" and dtype == torch.float16:
        name = "none"  # it cannot; the tensor travels as it is
    coded = message.body.coded
    assert ("none" if coded is None else coded.codec) == name
    [plain] = [message for _, message, _ in wire.sent if type(message.body) is not kind]
    assert plain.body.coded is None
    expected = CODECS[name].decode(CODECS[name].encode(tensor), tensor.shape, dtype)
    assert torch.equal(only(unpack(message, open_device("cpu"))), expected)
    assert (message.body.step, message.body.attempt) == (INFO.step, INFO.attempt)


@needs("codecs")
def test_boundary_io_of_the_cpu_encodes_beside_the_computing_thread(opened):
    io, wire = opened(open_device("cpu"), activations="int8")
    io.send(Forward(3, 1, 2, 0), (hidden(),))
    io.flush()
    assert wire.threads == ["sender"]


def test_boundary_io_of_a_device_waits_for_it_beside_the_computing_thread(opened):
    """Handing over returns at once; the message goes when the device has come to its event, and
    not before another one that was handed over first."""
    device = QueuedDevice()
    io, wire = opened(device)
    tensors = [hidden(torch.float32, 4) + k for k in range(3)]
    io.send(Forward(3, 1, 2, 0), (tensors[0],))
    io.send(Backward(3, 1, 0, 1), (tensors[1],))
    io.send(Forward(3, 1, 2, 1), (tensors[2],))
    assert wire.left == []
    device.events[2].reached.set()
    device.events[1].reached.set()
    assert wire.left == []
    device.reach()
    io.flush()
    assert wire.left == [("FORWARD", 2, 0), ("BACKWARD", 0, 1), ("FORWARD", 2, 1)]
    assert [torch.equal(wire.tensor(k), tensors[k]) for k in range(3)] == [True] * 3


@needs("codecs")
def test_boundary_io_gives_copies_back_when_they_are_written_and_only_then(opened):
    device = QueuedDevice(at_once=True)
    io, wire = opened(device, activations="int8")
    tensor = hidden()
    for k in range(2):
        io.send(Forward(3, 1, 2, k), (tensor + k,))
        io.flush()
        assert (device.out, device.given_back) == (2 * (k + 1), 2 * k)
        expected = CODECS["int8"].encode(tensor + k)
        [quantized, scales] = map(from_wire, wire.sent[k][1].tensors)
        assert torch.equal(quantized, expected[0])
        assert torch.equal(scales, expected[1])
        done = wire.sent[k][2]
        done()
    assert device.given_back == 4


def test_boundary_io_sends_losses_after_earlier_tensors(opened):
    """The loss of a micro-batch is sent after the tensors before it, and `flush` (ahead of
    GRADIENT_NORMS) waits for all of it."""
    device = QueuedDevice()
    io, wire = opened(device)
    io.send(Backward(3, 1, 0, 0), (hidden(),))
    io.outcome(INFO, 1, Outcome(torch.tensor(0.5)))
    io.send(Backward(3, 1, 0, 1), (hidden(),))
    assert wire.left == []
    threading.Timer(0.01, device.reach).start()
    io.flush()
    assert wire.left == [("BACKWARD", 0, 0), ("LOSS", 1, 0.5), ("BACKWARD", 0, 1)]
    assert isinstance(wire.left[1][2], float)
    assert device.given_back == 1  # the loss's; the others' are not written yet


def test_boundary_io_that_does_not_await_losses_passes_them_on_as_they_are(opened):
    device = QueuedDevice()
    io, wire = opened(device, awaited=False)
    loss = torch.tensor(0.5)
    io.outcome(INFO, 1, Outcome(loss))
    assert wire.left[0][2] is loss
    assert device.events == []


def test_boundary_io_reports_errors_of_sending(opened):
    """A frame that is too large, say, shows in the sender thread; the next one still goes."""
    device = QueuedDevice(at_once=True)
    io, wire = opened(device)
    wire.breaks = ProtocolError("larger than agreed")
    io.send(Forward(3, 1, 2, 0), (hidden(),))
    io.flush()
    wire.breaks = None
    io.send(Forward(3, 1, 2, 1), (hidden(),))
    io.flush()
    assert [str(error) for error in wire.failures] == ["larger than agreed"]
    assert wire.left == [("FORWARD", 2, 1)]


@needs("codecs")
def test_out_of_memory_while_encoding_names_its_attempt(opened, monkeypatch):
    def encode(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(CODECS["int8"]), "encode", encode)
    io, wire = opened(open_device("cpu"), activations="int8")
    io.send(Forward(3, 1, 2, 0), (hidden(),))
    io.flush()
    [error] = wire.failures
    assert isinstance(error, StepOutOfMemory)
    assert error.attempt == (3, 1)
    assert error.message.startswith("FORWARD of micro-batch 0 to stage 2: memory ran out")


def test_boundary_io_closes_its_thread(opened):
    io, _ = opened(QueuedDevice(at_once=True))
    io.send(Forward(3, 1, 2, 0), (hidden(),))
    io.close()
    assert "sender" not in {thread.name for thread in threading.enumerate()}


# ---- arrival times


def boundary(kind: type[Body], stage: int, step: int = 3) -> Message:
    info = StepInfo(step, 0, True, 4, 8)
    return boundary_message(kind, info, stage, 0, hidden())


def test_meter_takes_the_seconds_of_tensors_that_arrived():
    meter = ArrivalMeter(Recorder(0))
    moved = meter.watch(2)
    moved("receive", boundary(Forward, 1), 0.0, 1.0)
    moved("receive", boundary(Forward, 1), 5.0, 8.0)
    moved("receive", boundary(Backward, 1), 0.0, 0.5)
    moved("send", boundary(Forward, 2), 0.0, 100.0)
    commit = wire_forms.commit_message(Commit(3, 1, 1e-3, 1.0), {"embed": hidden()})
    moved("receive", commit, 0.0, 100.0)
    assert meter.take() == {"forward": {1: 1.0}, "backward": {1: 0.5}}
    assert meter.take() == {"forward": {}, "backward": {}}


def test_a_tensor_alone_takes_as_long_as_the_quickest_of_ten():
    shared = [(2.0, 100)] * 14  # two at once
    assert alone_s([*shared, (1.0, 100), (1.0, 100)]) == 1.0
    assert alone_s([(0.1, 100), (1.0, 100), *shared]) == 1.0  # one that lay in a buffer
    assert alone_s([(3.0, 100)]) == 3.0
    assert alone_s([(1.0, 100), (3.0, 300), (6.0, 300)]) == pytest.approx(7 / 3)  # of mean size
    assert alone_s([(1.0, 0)]) == 1.0


def test_meter_feeds_the_timeline():
    recorder = Recorder(-1)
    recorder.begin(3)
    ArrivalMeter(recorder).watch(2)("receive", boundary(Forward, 1), 0.5, 1.5)
    [span] = recorder.take()
    assert (span["kind"], span["stage"], span["peer"]) == (RECEIVE, 1, 2)
    assert (span["began"], span["ended"]) == (0.5, 1.5)


@pytest.mark.parametrize("device", [QueuedDevice(at_once=True), Device()], ids=["queued", "cpu"])
def test_boundary_io_sends_what_is_beside_a_loss_from_the_cpu(opened, device):
    io, wire = opened(device)
    io.outcome(INFO, 1, Outcome(torch.tensor(0.5), {"tokens": torch.tensor([7, 8])}))
    io.flush()
    (sent,) = wire.outcomes
    assert sent.loss == 0.5
    assert sent.named["tokens"].tolist() == [7, 8]
    io.close()
