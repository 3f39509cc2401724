"""Answers to an endpoint's requests.

Threads of connections put calls into a queue; the thread that computes takes them in order.

Every call gets an id that follows from what the client sent, so a repeated request finds its first
answer. A call that is refused is answered in words, in its turn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hetero_framework import log
from hetero_framework.errors import HeteroError, UserError
from hetero_framework.extras.talking.sampling import MOST_SAMPLES, SampleRequest, SampleResult
from hetero_framework.extras.tinker.call_records import CallRecords
from hetero_framework.extras.tinker.called_model import FAULTS, CalledModel, Lora
from hetero_framework.extras.tinker.datums import answer, call_of, message_of
from hetero_framework.extras.tinker.journal import KEPT_ANSWERS, Answer, Journal, KeptCall
from hetero_framework.trainer.checkpoint import CheckpointStore

SILENCE_S = 120.0
"""Seconds without a word of its client after which a session no longer holds the model."""
KNOWN_VERSIONS = ("0.38.",)
"""Versions of the client whose messages are known."""
_WAIT_S = 20.0  # of one question for an answer
_MOST_WAITING = 10_000
_MAX_TOKENS = 512  # of a sample for which the client names no number
_SNAPSHOTS = 8  # of weights without a name; each step of a policy gradient makes one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
_LASTING = ("create_model", "forward_backward", "optim_step", "load_weights", "save_weights")
_CHANGING = ("forward_backward", "optim_step", "load_weights")
_log = logging.getLogger(__name__)
T = TypeVar("T")


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
        self._journal, self._records = Journal(folder), CallRecords(folder)
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
        self._seen: dict[str, bytes] = {}  # digests of calls by their ids
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
            if self._was_undone(entry.id):
                continue
            if after < number <= up_to and (entry.kind in _CHANGING or is_new):
                result = _tried(entry.kind, partial(self._do, entry))
                if is_new:
                    self._answered(entry, result)

    def _was_undone(self, id: str) -> bool:
        """Whether a call ended by a fault of the server, and so changed nothing. One that ended by
        the client's mistake may have dropped the open step."""
        _, result = self._answers.get(id, (0, b""))
        return isinstance(result, dict) and result.get("category") == "server"

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Do calls until it is time to stop."""
        while not should_stop():
            try:
                entries = [self._queue.get(timeout=0.2).entry]
            except queue.Empty:
                continue
            if entries[0].kind != "asample":
                self._answered(entries[0], _tried(entries[0].kind, partial(self._do, entries[0])))
                continue
            while self._queue.queue and self._queue.queue[0].entry.kind == "asample":
                entries.append(self._queue.get().entry)
            self._sample(entries)

    def _answered(self, entry: KeptCall, result: Answer) -> None:
        if entry.kind in _LASTING:
            self._journal.answered(entry, result)
        self._records.note(entry, result, self._model.steps)
        with self._lock:
            self._answers[entry.id] = entry.number, result
            while len(self._answers) > KEPT_ANSWERS:
                number, _ = self._answers.pop(next(iter(self._answers)))
                self._journal.forget(number, answer=True)
            waiting = self._waiting.pop(entry.id, None)
        if waiting is not None:
            waiting.ready.set()
        durable = self._model.durable if entry.kind == "optim_step" else 0
        if durable >= min(self._log, default=durable + 1):
            self._forget(durable)

    def _forget(self, number: int) -> None:
        """Drop the calls up to a number: they need not be done again."""
        with self._lock:
            for old in [n for n in self._log if n <= number]:
                self._journal.forget(old)
                del self._log[old]

    def _do(self, entry: KeptCall) -> Answer:
        told = message_of(entry.kind, entry.body)
        return getattr(self, f"_do_{entry.kind}")(entry, told)  # type: ignore[no-any-return]

    def _do_forward_backward(self, entry: KeptCall, request: Any) -> Answer:
        self._held(request.model_id)
        call = call_of(request, self._model.rows, self._model.limits)
        do = self._model.forward if request.forward_only else self._model.forward_backward
        return answer(call, *do(call))

    def _do_create_model(self, entry: KeptCall, told: dict[str, Any]) -> Answer:
        if not f"/{self._name}".endswith(f"/{told['base_model']}"):
            raise UserError(
                f"this endpoint has the model {self._name!r}, no {told['base_model']!r}"
            )
        if (kind := told["optimizer_config"]["type"]) != "adamw":
            raise UserError(f"the optimizer {kind!r} is not supported: adamw is")
        return self._make(entry, told, Lora(**(told["lora_config"] or {"rank": 32})))

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
        _log.info("", extra=log.event("model made", id=id, **asdict(lora)))
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
        self._held(told["model_id"])
        adam = told["adam_params"]
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
                for old in [name for name in self._samplers if ":train:" in name][:-_SNAPSHOTS]:
                    self._versions.pop(forgotten := str(self._samplers.pop(old)), None)
                    place = self._place("sampler_weights", forgotten.rpartition("/")[2])
                    shutil.rmtree(place, ignore_errors=True)
            self._keep()
        return made

    def _sample(self, entries: Iterable[KeptCall]) -> None:
        """Do asample calls that wait one behind the other. Those of the same weights are computed
        together: several prompts keep the stages busy."""
        together: dict[str | None, list[tuple[KeptCall, SampleRequest]]] = {}
        for entry in entries:
            asked = _tried(entry.kind, partial(self._asked, entry))
            if isinstance(asked, dict):
                self._answered(entry, asked)
            else:
                together.setdefault(asked[0], []).append((entry, asked[1]))
        for path, calls in together.items():
            found = _tried("asample", partial(self._sampled, path, [asked for _, asked in calls]))
            for number, (entry, _) in enumerate(calls):
                self._answered(entry, found if isinstance(found, dict) else found[number])

    def _sampled(self, path: str | None, asked: list[SampleRequest]) -> list[bytes]:
        adapter = None if path is None else self._saved(path, "sampler_weights")
        if self._holder is None:
            raise UserError("there is no model yet: create_model comes before sampling")
        is_now = path is not None and path.startswith(f"tinker://{self._holder['id']}/")
        is_now = is_now and self._versions.get(path or "") == self._model.done
        return [_sample_response(result) for result in self._model.sample(asked, adapter, is_now)]

    def _asked(self, entry: KeptCall) -> tuple[str | None, SampleRequest]:
        """The path of the weights (None: the base model), and what is to be sampled."""
        told = message_of("asample", entry.body)
        path = told["model_path"]
        if (session := told["sampling_session_id"]) is not None:
            path = self._samplers[session]
        chunks = told["prompt"]["chunks"]
        if kinds := [c["type"] for c in chunks if c["type"] != "encoded_text"]:
            raise UserError(
                f"a chunk of kind {kinds[0]!r} is not supported: only tokens of text are"
            )
        for name in _NO_SAMPLES_OF:
            if told[name]:
                raise UserError(f"{name} is not supported")
        params = told["sampling_params"]
        seed, stop = params["seed"], params["stop"]
        request = SampleRequest(
            tuple(int(token) for chunk in chunks for token in chunk["tokens"]),
            num_samples=told["num_samples"],
            max_tokens=params["max_tokens"] or _MAX_TOKENS,
            temperature=params["temperature"],
            top_k=params["top_k"],
            top_p=params["top_p"],
            seed=secrets.randbits(31) if seed is None else seed,
            stop=tuple([stop] if isinstance(stop, str) else stop or ()),
            prompt_logprobs=bool(told["prompt_logprobs"]),
        )
        request.check(self._model.limits.vocabulary, self._model.limits.longest)
        return path, request

    # -- threads of connections -----------------------------------------------------------------

    def handle(self, path: str, body: bytes) -> Answer:
        """Answer a request at `path` of the protocol. Raises Refused."""
        try:
            told = message_of(path, body)
        except UserError as error:
            raise Refused(422 if path in _QUEUED else 400, error.message) from None
        if path in _QUEUED:
            number = told["num_samples"] if path == "asample" else 1
            if not 1 <= number <= MOST_SAMPLES:
                raise Refused(422, f"num_samples is no number from 1 to {MOST_SAMPLES}")
            id = self._id_of(path, told)
            self._check_is_one(id, _digest(told))
            promise = self._promise(path, body, id)
            if path == "asample":
                ids = [f"{promise['request_id']}:{k}" for k in range(number)]
                promise["sample_sequence_ids"] = ids
            return promise
        if path.startswith("samplers/"):
            return self._sampler(path.removeprefix("samplers/"))
        if found := re.fullmatch("sessions/([^/]+)/finish", path):
            return self._finish(found[1])
        at_once = getattr(self, f"_at_{path.replace('/', '_')}", None)
        if at_once is None:
            raise Refused(404, f"{path} is not served here")
        try:
            return at_once(told)  # type: ignore[no-any-return]
        except (KeyError, TypeError) as error:
            raise Refused(422, f"{path}: the field {error} is absent or wrong") from None

    def _id_of(self, path: str, told: Any) -> str:
        if path == "forward_backward":
            told = {"model_id": told.model_id, "seq_id": told.seq_id}
        try:
            if path == "asample":
                owner, number = told["sampling_session_id"], told["seq_id"]
                if owner is not None and owner not in self._samplers:
                    raise Refused(404, f"there is no sampling session {owner!r}")
                return f"{owner}:{int(number)}"
            if told.get("model_id") is not None:
                self._hear(told["model_id"])
                return f"{told['model_id']}:{int(told['seq_id'])}"
            self._hear(told["session_id"])
            return f"{told['session_id']}:train:{int(told['model_seq_id'])}:0"
        except (KeyError, TypeError) as error:
            raise Refused(422, f"{path}: the field {error} is absent or wrong") from None

    def _hear(self, id: str) -> None:
        """Note that a session's client has said something."""
        session = str(id).partition(":")[0]
        with self._lock:
            if session not in self._sessions:
                raise Refused(404, f"there is no session {session!r}")
            self._sessions[session] = time.monotonic()

    def _check_is_one(self, id: str, digest: bytes) -> None:
        """Refuse another call of the same number, which a second client of a session makes."""
        with self._lock:
            if self._seen.setdefault(id, digest) != digest:
                raise Refused(422, f"the call {id} was another one: is there a second client?")
            while len(self._seen) > _MOST_WAITING:
                del self._seen[next(iter(self._seen))]

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
        _log.info("", extra=log.event("session begun", session=session))
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

    def _sampler(self, id: str) -> Answer:
        if id not in self._samplers:
            raise Refused(404, f"there is no sampling session {id!r}")
        return {"sampler_id": id, "base_model": self._name, "model_path": self._samplers[id]}

    def _finish(self, session: str) -> Answer:
        with self._lock:
            self._sessions.pop(session, None)
            self._keep()
        _log.info("", extra=log.event("session ended", session=session))
        return {}

    def _keep(self) -> None:
        """Keep what no call's message says. `_lock` is held."""
        state = {"sessions": [*self._sessions], "model": self._holder}
        self._journal.keep({**state, "samplers": self._samplers, "versions": self._versions})


def _tried(kind: str, do: Callable[[], T]) -> T | dict[str, Any]:
    """The result of a call. If it fails, an answer with the error, which names the client or the
    server as its cause."""
    try:
        return do()
    except UserError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return {"error": f"{error.message}{hint}", "category": "user"}
    except HeteroError:
        raise
    except FAULTS:
        _log.exception("a call of %s failed", kind)
        return {"error": f"{kind} failed in the server, whose log says more", "category": "server"}


def _sample_response(result: SampleResult) -> bytes:
    from tinker.proto import tinker_public_pb2 as pb

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


def _digest(told: Any) -> bytes:
    """Of a message: what repeats have in common, whatever the order of their fields."""
    data = (
        json.dumps(told, sort_keys=True, default=str).encode()
        if isinstance(told, dict)
        else (told.SerializeToString(deterministic=True))
    )
    return hashlib.sha256(data).digest()


def _floats(values: Iterable[float | None]) -> bytes:
    """float32, NaN for None."""
    return np.array([math.nan if v is None else v for v in values], np.float32).tobytes()


_QUEUED = (*_LASTING, "save_weights_for_sampler", "asample")
_NO_SAMPLES_OF = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
