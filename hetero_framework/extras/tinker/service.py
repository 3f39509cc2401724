"""Answers to an endpoint's requests.

Threads of connections put calls into a queue; the thread that computes takes them in order.

Every call gets an id that follows from what the client sent, so a repeated request finds its first
answer. A call that is refused is answered in words, in its turn.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetero_framework.errors import HeteroError, UserError, in_words
from hetero_framework.extras.talking.sampling import MOST_SAMPLES, SampleRequest
from hetero_framework.extras.tinker.called_model import CalledModel, Lora
from hetero_framework.extras.tinker.datums import answer, call_of
from hetero_framework.extras.tinker.journal import KEPT_ANSWERS, Answer, Journal, KeptCall
from hetero_framework.trainer.checkpoint import CheckpointStore

SILENCE_S = 600.0
"""Seconds without a word of its client after which a session no longer holds the model."""
KNOWN_VERSIONS = ("0.38.",)
"""Versions of the client whose messages are known."""
_WAIT_S = 20.0  # of one question for an answer
_MOST_WAITING = 10_000
_MAX_TOKENS = 512  # of a sample for which the client names no number
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
_LASTING = ("create_model", "forward_backward", "optim_step", "load_weights", "save_weights")
_CHANGING = ("forward_backward", "optim_step", "load_weights")
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is answered at once, with an HTTP status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class _Waiting:
    """A call that has no answer yet, or just got it."""

    entry: KeptCall
    ready: threading.Event


class Service:
    """The sessions, the one model, and what was saved. `handle` is called by any thread; `run`
    belongs to the thread that computes."""

    def __init__(self, model: CalledModel, name: str, folder: Path) -> None:
        """`name` is the base model's; `folder` keeps everything."""
        self._model, self._name, self._folder = model, name, folder
        self._journal = Journal(folder)
        self._lock = threading.Lock()
        self._answers = self._journal.answers()
        self._log = {entry.number: entry for entry in self._journal.entries()}
        kept = self._journal.load()
        self._sessions: dict[str, float] = dict.fromkeys(kept.get("sessions", []), time.monotonic())
        self._holder: dict[str, Any] | None = kept.get("model")
        self._samplers: dict[str, str | None] = kept.get("samplers", {})
        self._versions: dict[str, int] = kept.get("versions", {})
        numbers = [number for number, _ in self._answers.values()]
        self._number = max([*self._log, *numbers, 0])
        self._waiting: dict[str, _Waiting] = {}
        self._queue: queue.Queue[_Waiting] = queue.Queue()
        model.repeat = self._repeat

    # -- the thread that computes ---------------------------------------------------------------

    def resume(self) -> None:
        """Go on where a killed process was: load its model, and do again what is not durable."""
        if self._holder is not None:
            self._model.make(Lora(**self._holder["lora"]), goes_on=True)
        self._repeat(self._model.done, self._number, answers=True)

    def _repeat(self, after: int, up_to: int, *, answers: bool = False) -> None:
        """Do calls again, in order; with `answers` also those that were never answered."""
        with self._lock:
            calls = sorted(self._log.items())
        for number, entry in calls:
            is_new = answers and entry.id not in self._answers
            if after < number <= up_to and (entry.kind in _CHANGING or is_new):
                result = self._outcome(entry)
                if is_new:
                    self._answered(entry, result)

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Do calls until it is time to stop."""
        while not should_stop():
            try:
                waiting = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            self._answered(waiting.entry, self._outcome(waiting.entry))

    def _outcome(self, entry: KeptCall) -> Answer:
        """Do a call. What a client did wrong becomes its answer."""
        try:
            return self._do(entry)
        except HeteroError as error:
            if not isinstance(error, UserError):
                raise
            hint = f" ({error.hint})" if error.hint else ""
            return {"error": f"{error.message}{hint}", "category": "user"}
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("a call of %s could not be read", entry.kind, exc_info=True)
            return {"error": f"{entry.kind}: {in_words(error)}", "category": "user"}

    def _answered(self, entry: KeptCall, result: Answer) -> None:
        if entry.kind in _LASTING:
            self._journal.answered(entry, result)
        with self._lock:
            self._answers[entry.id] = entry.number, result
            while len(self._answers) > KEPT_ANSWERS:
                del self._answers[next(iter(self._answers))]
            waiting = self._waiting.pop(entry.id, None)
        if waiting is not None:
            waiting.ready.set()
        durable = self._model.durable if entry.kind == "optim_step" else 0
        if durable >= min(self._log, default=durable + 1):
            self._forget(durable)

    def _forget(self, number: int) -> None:
        """Drop the calls up to a number: they need not be done again."""
        self._journal.forget(number)
        with self._lock:
            self._log = {n: entry for n, entry in self._log.items() if n > number}

    def _do(self, entry: KeptCall) -> Answer:
        if entry.kind == "forward_backward":
            return self._pass(entry)
        told = json.loads(entry.body)
        return getattr(self, f"_do_{entry.kind}")(entry, told)  # type: ignore[no-any-return]

    def _pass(self, entry: KeptCall) -> Answer:
        from tinker.proto import tinker_public_pb2 as pb

        request = pb.ForwardBackwardRequest.FromString(entry.body)
        self._held(request.model_id)
        call = call_of(request, self._model.rows, self._model.limits)
        do = self._model.forward if request.forward_only else self._model.forward_backward
        return answer(call, *do(call))

    def _do_create_model(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        if told["base_model"] not in (self._name, Path(self._name).name):
            raise UserError(
                f"this endpoint has the model {self._name!r}, no {told['base_model']!r}"
            )
        if (kind := told.get("optimizer_config", {}).get("type", "adamw")) != "adamw":
            raise UserError(f"the optimizer {kind!r} is not supported: adamw is")
        lora = told.get("lora_config") or {"rank": 32}
        return self._make(entry, told, Lora(**lora))

    def _make(self, entry: KeptCall, told: dict[str, Any], lora: Lora) -> dict[str, Any]:
        if not 1 <= lora.rank <= 4096:
            raise UserError(f"a LoRA rank of {lora.rank} is not possible: 1 to 4096 are")
        session = told["session_id"]
        before = self._holder
        if before is not None and before["session"] != session and self._lives(before["session"]):
            raise UserError(
                f"the endpoint holds one model, which session {before['session']} trains: it is"
                f" free once that session has been silent for {SILENCE_S:.0f} s"
            )
        if before is not None and before["number"] == entry.number:
            return {"model_id": before["id"], "type": "create_model"}
        id = f"{session}:train:{told['model_seq_id']}"
        self._model.make(lora)
        with self._lock:
            about = {"id": id, "session": session, "lora": asdict(lora), "number": entry.number}
            self._holder = about
            self._keep()
        self._forget(entry.number - 1)
        return {"model_id": id, "type": "create_model"}

    def _lives(self, session: str) -> bool:
        heard = self._sessions.get(session)
        return heard is not None and time.monotonic() - heard < SILENCE_S

    def _held(self, id: str) -> None:
        """Raise UserError unless this model is the one that is held."""
        if self._holder is None or self._holder["id"] != id:
            now = "there is none" if self._holder is None else f"it is {self._holder['id']} now"
            raise UserError(f"{id} is not the model of this endpoint: {now}")

    def _do_optim_step(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        from tinker.types import AdamParams

        self._held(told["model_id"])
        if "adam_params" not in told:
            raise UserError("only Adam's numbers are supported in optim_step")
        adam = AdamParams.model_validate(told["adam_params"]).model_dump()
        if bad := [name for name, value in adam.items() if not math.isfinite(value) or value < 0]:
            raise UserError(f"optim_step: {bad[0]} is {adam[bad[0]]}")
        if bad := [name for name in ("beta1", "beta2") if adam[name] >= 1]:
            raise UserError(f"optim_step: {bad[0]} is {adam[bad[0]]}, and has to be below 1")
        metrics = self._model.optim_step(adam, entry.number)
        return {"type": "optim_step", "metrics": metrics}

    def _place(self, kind: str, name: str) -> Path:
        """The folder of what was saved under a name."""
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is no name: letters, digits, '.', '_' and '-' are")
        return self._folder / kind / name

    def _do_save_weights(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        self._held(told["model_id"])
        name = told.get("path") or f"{entry.number}"
        place = self._place("weights", name)
        if place.exists() and not told.get("overwrite") and entry.id in self._answers:
            raise UserError(f"there are weights of the name {name!r} already")
        self._model.save(place)
        about = {**(self._holder or {}), "base_model": self._name}
        (place / "client.json").write_text(json.dumps(about), encoding="utf-8")
        return {"path": f"tinker://{told['model_id']}/weights/{name}", "type": "save_weights"}

    def _saved(self, path: str, kind: str) -> Path:
        """The folder of a tinker:// path. Raises UserError."""
        found = _PATH.fullmatch(path)
        place = self._place(kind, found[3]) if found and found[2] == kind else None
        if place is None or not place.is_dir():
            raise UserError(f"there are no {kind} at {path!r}")
        return place

    def _do_load_weights(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        place = self._saved(told["path"], "weights")
        id = told.get("model_id")
        if id is None:
            about = json.loads((place / "client.json").read_text(encoding="utf-8"))
            self._make(entry, told, Lora(**about["lora"]))
            id = f"{told['session_id']}:train:{told['model_seq_id']}"
        self._held(id)
        reader = CheckpointStore(place).resolve("latest")
        optimizer = bool(told["optimizer"])
        self._model.load(reader, with_optimizer=optimizer, number=entry.number)
        return {"path": told["path"], "model_id": id, "type": "load_weights"}

    def _do_save_weights_for_sampler(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        self._held(told["model_id"])
        name = told.get("path") or f"{entry.number}"
        self._model.export(self._place("sampler_weights", name))
        path = f"tinker://{told['model_id']}/sampler_weights/{name}"
        made: dict[str, Any] = {"path": path, "type": "save_weights_for_sampler"}
        with self._lock:
            self._versions[path] = self._model.done
            if told.get("path") is None:
                id = f"{told['model_id']}:sample:{told.get('sampling_session_seq_id')}"
                self._samplers[id] = path
                made["sampling_session_id"] = id
            self._keep()
        return made

    def _do_asample(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        path = told.get("model_path")
        if (session := told.get("sampling_session_id")) is not None:
            path = self._samplers[session]
        adapter = None if path is None else self._saved(path, "sampler_weights")
        if self._holder is None:
            raise UserError("there is no model yet: create_model comes before sampling")
        is_now = path is not None and path.startswith(f"tinker://{self._holder['id']}/")
        is_now = is_now and self._versions.get(path or "") == self._model.done
        return self._sampled(told, adapter, is_now)

    def _sampled(self, told: dict[str, Any], adapter: Path | None, is_now: bool) -> bytes:
        from tinker.proto import tinker_public_pb2 as pb

        result = self._model.sample(self._asked(told), adapter, is_now)
        output = pb.SampleResponse()
        if result.prompt_logprobs is not None:
            output.prompt_logprobs = _floats(result.prompt_logprobs)
        for sample in result.samples:
            sequence = output.sequences.add()
            ended = sample.stop_reason == "stop"
            sequence.stop_reason = pb.STOP_REASON_STOP if ended else pb.STOP_REASON_LENGTH
            sequence.tokens = np.array(sample.tokens, np.int32).tobytes()
            sequence.logprobs = _floats(sample.logprobs)
        return bytes(output.SerializeToString())

    def _asked(self, told: dict[str, Any]) -> SampleRequest:
        chunks = told["prompt"]["chunks"]
        if kinds := [
            c.get("type") for c in chunks if c.get("type", "encoded_text") != "encoded_text"
        ]:
            raise UserError(
                f"a chunk of kind {kinds[0]!r} is not supported: only tokens of text are"
            )
        prompt = [int(token) for chunk in chunks for token in chunk["tokens"]]
        self._model.limits.check(np.array(prompt, np.int64), "the prompt")
        params = told["sampling_params"]
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if told.get(name):
                raise UserError(f"{name} is not supported")
        seed, stop = params.get("seed"), params.get("stop")
        return SampleRequest(
            tuple(prompt),
            num_samples=int(told.get("num_samples", 1)),
            max_tokens=params.get("max_tokens") or _MAX_TOKENS,
            temperature=params.get("temperature", 1.0),
            top_k=params.get("top_k", -1),
            top_p=params.get("top_p", 1.0),
            seed=secrets.randbits(31) if seed is None else int(seed),
            stop=tuple([stop] if isinstance(stop, str) else stop or ()),
            prompt_logprobs=bool(told.get("prompt_logprobs")),
        )

    # -- threads of connections -----------------------------------------------------------------

    def handle(self, path: str, body: bytes) -> Answer:
        """Answer a request at `path` of the protocol. Raises Refused."""
        if path == "forward_backward":
            return self._promise(path, body, self._id_of_pass(body))
        try:
            told = json.loads(body or b"{}")
            assert isinstance(told, dict)
        except (ValueError, AssertionError, RecursionError):
            raise Refused(400, "the body is no JSON object") from None
        if path in _QUEUED:
            number = told.get("num_samples", 1) if path == "asample" else 0
            if not (isinstance(number, int) and 0 <= number <= MOST_SAMPLES):
                raise Refused(422, f"num_samples is no number from 1 to {MOST_SAMPLES}")
            promise = self._promise(path, body, self._id_of(path, told))
            if number:
                ids = [f"{promise['request_id']}:{k}" for k in range(number)]
                promise["sample_sequence_ids"] = ids
            return promise
        at_once = getattr(self, f"_at_{path.replace('/', '_')}", None)
        if at_once is None:
            raise Refused(404, f"{path} is not served here")
        try:
            return at_once(told)  # type: ignore[no-any-return]
        except (KeyError, TypeError) as error:
            raise Refused(422, f"{path}: the field {error} is absent or wrong") from None

    def _id_of_pass(self, body: bytes) -> str:
        from google.protobuf.message import DecodeError
        from tinker.proto import tinker_public_pb2 as pb

        try:
            request = pb.ForwardBackwardRequest.FromString(body)
        except DecodeError:
            raise Refused(400, "the body is no ForwardBackwardRequest") from None
        self._hear(request.model_id)
        return f"{request.model_id}:{request.seq_id}"

    def _id_of(self, path: str, told: Mapping[str, Any]) -> str:
        try:
            if told.get("model_id") is not None:
                self._hear(told["model_id"])
                return f"{told['model_id']}:{told['seq_id']}"
            if path == "asample":
                session = told["sampling_session_id"]
                if session is not None and session not in self._samplers:
                    raise Refused(404, f"there is no sampling session {session!r}")
                return f"{session}:{told['seq_id']}"
            self._hear(told["session_id"])
            return f"{told['session_id']}:train:{told['model_seq_id']}:0"
        except (KeyError, TypeError) as error:
            raise Refused(422, f"{path}: the field {error} is absent or wrong") from None

    def _hear(self, id: str) -> None:
        """Note that a session's client has said something."""
        session = str(id).partition(":")[0]
        with self._lock:
            if session not in self._sessions:
                raise Refused(404, f"there is no session {session!r}")
            self._sessions[session] = time.monotonic()

    def _promise(self, kind: str, body: bytes, id: str) -> dict[str, Any]:
        """Put a call into the queue, unless it is there or answered; return where to ask for it."""
        with self._lock:
            if id not in self._answers and id not in self._waiting:
                if len(self._waiting) >= _MOST_WAITING:
                    raise Refused(429, f"{_MOST_WAITING} calls wait already")
                self._number += 1
                entry = KeptCall(self._number, id, kind, body)
                if kind in _LASTING:
                    self._journal.add(entry)
                    self._log[entry.number] = entry
                self._waiting[id] = waiting = _Waiting(entry, threading.Event())
                self._queue.put(waiting)
        return {"request_id": id, "model_id": id.rpartition(":")[0]}

    def _at_retrieve_future(self, told: dict[str, Any]) -> Answer:
        id = told["request_id"]
        with self._lock:
            waiting = self._waiting.get(id)
        if waiting is not None:
            waiting.ready.wait(_WAIT_S)
        with self._lock:
            if id in self._answers:
                return self._answers[id][1]
        if waiting is None:
            raise Refused(410, f"nothing is known of the call {id!r}: make it again")
        raise Refused(408, "the call is not done yet")

    def _at_client_config(self, told: dict[str, Any]) -> Answer:
        return {"parallel_fwdbwd_chunks": False}

    _at_client_dynamic_config = _at_client_config

    def _at_healthz(self, told: dict[str, Any]) -> Answer:
        return {"status": "ok"}

    def _at_telemetry(self, told: dict[str, Any]) -> Answer:
        return {"status": "accepted"}  # and dropped

    def _at_get_server_capabilities(self, told: dict[str, Any]) -> Answer:
        about = {"model_name": self._name, "max_context_length": self._model.limits.longest}
        return {"supported_models": [{**about, "trainable": True, "sampleable": True}]}

    def _at_create_session(self, told: dict[str, Any]) -> Answer:
        version = str(told["sdk_version"])
        if not version.startswith(KNOWN_VERSIONS):
            known = ", ".join(f"{v}*" for v in KNOWN_VERSIONS)
            raise Refused(400, f"the client's version {version} is not known here ({known} are)")
        session = f"s{secrets.token_hex(6)}"
        with self._lock:
            self._sessions[session] = time.monotonic()
            self._keep()
        return {"session_id": session, "type": "create_session"}

    def _at_session_heartbeat(self, told: dict[str, Any]) -> Answer:
        self._hear(told["session_id"])
        return {"type": "session_heartbeat"}

    def _at_get_info(self, told: dict[str, Any]) -> Answer:
        held = self._holder
        if held is None or held["id"] != told["model_id"]:
            raise Refused(404, f"there is no model {told['model_id']!r}")
        data = {"arch": self._model.kind, "model_name": self._name, "tokenizer_id": self._name}
        rank = held["lora"]["rank"]
        about = {"type": "get_info", "model_id": held["id"], "is_lora": True, "lora_rank": rank}
        return {**about, "model_data": data, "model_name": self._name}

    def _at_create_sampling_session(self, told: dict[str, Any]) -> Answer:
        self._hear(told["session_id"])
        id = f"{told['session_id']}:sample:{told['sampling_session_seq_id']}"
        try:
            if told.get("model_path") is not None:
                self._saved(told["model_path"], "sampler_weights")
        except UserError as error:
            raise Refused(404, error.message) from None
        with self._lock:
            self._samplers[id] = told.get("model_path")
            self._keep()
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    def _keep(self) -> None:
        """Keep what no call's message says. `_lock` is held."""
        state = {"sessions": [*self._sessions], "model": self._holder}
        self._journal.keep({**state, "samplers": self._samplers, "versions": self._versions})


def _floats(values: Iterable[float | None]) -> bytes:
    """float32, NaN for None."""
    return np.array([math.nan if v is None else v for v in values], np.float32).tobytes()


_QUEUED = (*_LASTING, "save_weights_for_sampler", "asample")
