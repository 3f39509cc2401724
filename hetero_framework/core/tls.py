"""TLS 1.3 with certificates on both sides, as a `Stream` over a `PlainStream`.

OpenSSL checks that the other side's certificate comes from this cluster's authority; the caller's
`admit` checks its content, before a byte of the protocol is read. A connection reads in one thread
and writes in others, while OpenSSL's object allows one thread at a time. So that object works on
memory under a lock, and the socket is read and written outside of the lock.

Within one machine a connection leaves TLS once it has shown each side who the other is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework.core import addresses, timeouts
from hetero_framework.core.dial import HANDSHAKE_HINT
from hetero_framework.core.frames import PIECE_BYTES
from hetero_framework.core.identity import Identity
from hetero_framework.core.send_queue import drop_sent
from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.errors import IdentityError
from hetero_framework.log import one_line

_log = logging.getLogger(__name__)
ALPN = "hetero/1"
OFF = "HETERO_LOCAL_SOCKETS"
"""With "off" in this variable of the environment a process keeps to TLS."""
_SAME_MACHINE = "same_machine"
_CIPHERTEXT_BYTES = 1 << 18
_PLAIN_BYTES = 2 * (PIECE_BYTES + 1)
"""Most bytes that are read from the socket, or encrypted, at a time."""
_JOINED_BYTES = 1 << 14
"""Buffers up to this size, the most that a record holds, are joined before they are encrypted."""
_NOTE_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Certificate:
    """The other side's certificate, verified by OpenSSL."""

    identity: Identity
    serial: int


Admit = Callable[[Certificate, dict[str, Any]], "str | None"]
"""Returns why a peer with this certificate and this note is not wanted; None if it is."""


def context(
    bundle: Path, *, server: bool, alpn: str = ALPN, anonymous: bool = False
) -> ssl.SSLContext:
    """The context of connections with the key in `bundle`, one PEM file with its certificate and
    the authority's. `anonymous`: the other side need not show a certificate. Raises OSError, and
    IdentityError where the parts are damaged or do not belong together."""
    made = _context(server, alpn)
    try:
        authority = bundle.read_text(encoding="ascii").split(_END)[-2] + _END
        made.load_cert_chain(bundle, password=_no_password)
        made.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError, IndexError) as error:
        raise IdentityError(
            f"{bundle} is damaged: {_reason(error) or error}",
            hint="have this machine invited again (hetero invite)",
        ) from error
    made.verify_mode = ssl.CERT_NONE if anonymous else ssl.CERT_REQUIRED
    return made


def joining_context(authority: str, alpn: str) -> ssl.SSLContext:
    """The context of a machine without a key, which trusts this authority (PEM) alone."""
    made = _context(False, alpn)
    made.load_verify_locations(cadata=authority)
    return made


def _context(server: bool, alpn: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    if server:
        made.num_tickets = 0
    made.check_hostname = False  # the identity is a URI, which `admit` looks at
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.set_alpn_protocols([alpn])
    return made


def _no_password() -> str:
    raise ValueError("its key is encrypted")


def dial(
    plain: Stream, made: ssl.SSLContext, admit: Admit, note: dict[str, Any], who: str
) -> Stream:
    """The encrypted stream to the side that was dialled, which has admitted us; `plain` itself if
    it stays on this machine. Raises IdentityError when one side refuses the other, and OSError for
    a failure that may pass; either closes `plain`."""
    with contextlib.ExitStack() as on_error:
        on_error.callback(plain.close)
        stream = TlsStream(plain, made, server=False)
        deadline = time.monotonic() + timeouts.STRANGER_S
        with explained(who):
            stream.shake_hands(deadline)
            if (why := admit(stream.certificate(), {})) is not None:
                raise IdentityError(f"{who} is not who it should be: {why}")
            here = _place(plain)
            stream.send_note({**note, _SAME_MACHINE: here}, deadline)
            answer = stream.receive_note(deadline)
            there = answer.pop(_SAME_MACHINE, None)
            if (refused := answer.get("refused")) is not None:
                raise IdentityError(f"{who} refused this machine: {one_line(str(refused))}")
            if (why := admit(stream.certificate(), answer)) is not None:
                raise IdentityError(f"{who} is not wanted any more: {why}")
            leaves = here is not None and there == here
            if leaves:
                _say_left(plain, deadline)
        on_error.pop_all()
        return _without_tls(plain, who) if leaves else stream


def accept(
    plain: Stream, made: ssl.SSLContext, admit: Admit, note: dict[str, Any]
) -> tuple[Stream, Certificate]:
    """The stream to a peer that has dialled, as `dial` gives it, and the peer's certificate. Raises
    as `dial` does. A refused peer of this cluster gets the reason, others get an alert."""
    with contextlib.ExitStack() as on_error:
        on_error.callback(plain.close)
        stream = TlsStream(plain, made, server=True)
        deadline = time.monotonic() + timeouts.STRANGER_S
        with explained("it"):
            stream.shake_hands(deadline)
            certificate = stream.certificate()
            theirs = stream.receive_note(deadline)
            here, there = _place(plain), theirs.pop(_SAME_MACHINE, None)
            if (why := admit(certificate, theirs)) is not None:
                stream.send_note({"refused": why}, deadline)
                raise IdentityError(why)
            leaves = here is not None and there == here
            stream.send_note({**note, _SAME_MACHINE: here if leaves else None}, deadline)
            if leaves:
                _await_left(plain, deadline)
        on_error.pop_all()
        return _without_tls(plain, str(certificate.identity)) if leaves else stream, certificate


def _place(plain: Stream) -> str | None:
    """A hash of this machine's boot, the network namespace, and the addresses of both ends. Only
    the other end of the same connection has the same hash: a tunnel or proxy in between would have
    a connection of its own to each side, and a kernel has no two with equal ends. None where the
    hosts of the ends differ, so that bytes may pass an interface, and where TLS has to stay."""
    if os.environ.get(OFF) == "off" or not isinstance(plain, PlainStream):
        return None
    try:
        ends = plain.ends()
        # Only Linux has these files.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return None
    hosts = {host for host, _ in ends}
    if not (len(hosts) == 1 or (hosts and all(map(addresses.is_loopback, hosts)))):
        return None
    return hashlib.sha256(repr((boot, network, ends)).encode()).hexdigest()


def _say_left(plain: Stream, deadline: float) -> None:
    """Send the first byte without TLS: this side has read all that was encrypted."""
    while not plain.write(deque([memoryview(b"\0")])):
        _check(deadline)


def _await_left(plain: Stream, deadline: float) -> None:
    """Wait for the byte of `_say_left`; the dialler would take anything earlier for TLS."""
    while (count := plain.read(memoryview(bytearray(1)))) is None:
        _check(deadline)
    if not count:
        raise ConnectionResetError


def _without_tls(plain: Stream, who: str) -> Stream:
    assert isinstance(plain, PlainStream)  # as `_place` found
    plain.become_local()
    _log.info("%s is on this machine: the link goes on without encryption", who)
    return plain


_MEANINGS = {
    # A peer's faults by OpenSSL's names; "{}" is the peer.
    "CERTIFICATE_VERIFY_FAILED": "{} has keys of another cluster, or a certificate of its own",
    "TLSV1_ALERT_UNKNOWN_CA": "for {} this machine has keys of another cluster",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "{} shows no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "{} wants a certificate, and this machine showed none",
    "WRONG_VERSION_NUMBER": "{} does not speak TLS",
    "HTTP_REQUEST": "{} does not speak TLS but HTTP",
    "UNSUPPORTED_PROTOCOL": "{} does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "{} does not speak TLS 1.3",
    "NO_APPLICATION_PROTOCOL": "{} speaks TLS, but another protocol",
}
_INVITE = "have the machine with the wrong keys invited again (hetero invite)"
# OpenSSL's verify codes for a certificate outside of its dates, and its names for the alerts with
# which a peer says the same. BAD_CERTIFICATE may mean more, but nothing else that happens here.
_BY_THIS_CLOCK = {9: "is not valid yet", 10: "has expired"}
_BY_THE_OTHER = {
    "SSLV3_ALERT_BAD_CERTIFICATE": "not valid yet",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "expired",
}
SET_CLOCK = "set it by the network (timedatectl set-ntp true), then try again"


def _wrong_clock(who: str, error: ssl.SSLError) -> IdentityError | None:
    """The error, if a failed handshake comes from a wrong clock."""
    here = f"this machine's clock says {_date(time.time())}"
    whose = "its certificate" if who == "it" else f"the certificate of {who}"
    if (state := _BY_THIS_CLOCK.get(getattr(error, "verify_code", 0))) is not None:
        text = f"{here}, by which {whose} {state}"
        return IdentityError(text, hint=f"the clock of this machine is wrong: {SET_CLOCK}")
    if (state := _BY_THE_OTHER.get(_reason(error))) is not None:
        text = f"{who} takes this machine's certificate for {state} by its own clock; {here}"
        return IdentityError(text, hint=f"one of the two clocks is wrong: {SET_CLOCK}")
    return None


def clock_problem(made: ssl.SSLContext) -> str | None:
    """The problem where this machine's keys, by its clock, are not valid yet or not any more."""
    now = time.time()
    for authority in made.get_ca_certs():
        dates: dict[str, Any] = authority
        first, last = (ssl.cert_time_to_seconds(dates[n]) for n in ("notBefore", "notAfter"))
        if not first <= now <= last:
            return (
                f"this machine's clock says {_date(now)}, and its keys are good from "
                f"{_date(first)} to {_date(last)}"
            )
    return None


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) + " UTC"


@contextlib.contextmanager
def explained(who: str) -> Iterator[None]:
    """Turns OpenSSL's errors about a peer into IdentityError, or OSError where a retry may help."""
    try:
        yield
    except ssl.SSLError as error:
        if (clock := _wrong_clock(who, error)) is not None:
            raise clock from error
        meaning = _MEANINGS.get(_reason(error))
        if meaning is None:
            text = f"the TLS handshake failed ({_reason(error) or error})"
            raise ConnectionAbortedError(errno.ECONNABORTED, text) from error
        about_keys = "CERTIFICATE" in _reason(error) or "_CA" in _reason(error)
        hint = _INVITE if about_keys else HANDSHAKE_HINT
        raise IdentityError(meaning.format(who), hint=hint) from error
    except (ConnectionResetError, BrokenPipeError) as error:
        text = "it ended the connection in the handshake"
        raise ConnectionResetError(errno.ECONNRESET, text) from error
    except (ValueError, RecursionError) as error:  # JSON, too
        raise IdentityError(f"{who} does not keep to the protocol: {error}") from error


def _reason(error: Exception) -> str:
    """OpenSSL's name of the error."""
    reason = getattr(error, "reason", None)
    return str(reason or str(error).partition("SSL: ")[2].partition("]")[0])


class TlsStream:
    """An encrypted stream, which owns `plain` from now on. Use `dial` or `accept` to make one."""

    local = False

    def __init__(self, plain: Stream, made: ssl.SSLContext, *, server: bool, alpn: str = ALPN):
        self._plain = plain
        self._alpn = alpn
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = made.wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()  # of the three above
        self._received = memoryview(bytearray(_CIPHERTEXT_BYTES))
        self._unsent: deque[memoryview] = deque()  # encrypted; the writing side's own
        self._owed = 0  # bytes that are encrypted, but not reported as written

    @property
    def peer(self) -> str:
        return self._plain.peer

    def set_tick(self, seconds: float) -> None:
        self._plain.set_tick(seconds)

    # -- the handshake, before other threads know the stream --------------------------------------

    def shake_hands(self, deadline: float) -> None:
        """Complete the handshake. Raises OSError, which includes the ssl.SSLError that `explained`
        puts in words, and TimeoutError when time.monotonic() reaches `deadline`."""
        while True:
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._feed(deadline)
                continue
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(deadline)  # the alert tells the other side why
                    soon = min(deadline, time.monotonic() + timeouts.LAST_WORD_S)
                    self._plain.end_writes()
                    # To the end: closing a connection with unread bytes takes back what was sent.
                    while self._plain.read(self._received) != 0:
                        _check(soon)
                raise
            self._flush(deadline)
            if self._ssl.selected_alpn_protocol() != self._alpn:
                raise ssl.SSLError(1, "[SSL: NO_APPLICATION_PROTOCOL] it speaks another protocol")
            return

    def certificate(self) -> Certificate:
        """The other side's certificate. IdentityError if it names no process of a cluster."""
        fields = self._ssl.getpeercert() or {}
        names: Any = fields.get("subjectAltName", ())
        try:
            [(kind, uri)] = names
            if kind != "URI":
                raise ValueError(f"its certificate names {kind} {uri!r}")
            return Certificate(Identity.parse(uri), int(str(fields["serialNumber"]), 16))
        except ValueError as error:
            raise IdentityError(f"{error}") from error

    def send_note(self, note: dict[str, Any], deadline: float) -> None:
        """Send JSON before anything else is sent."""
        data = json.dumps(note).encode()
        self._ssl.write(_LENGTH.pack(len(data)) + data)
        self._flush(deadline)

    def receive_note(self, deadline: float, most: int = _NOTE_BYTES) -> dict[str, Any]:
        """The note that `send_note` sent. Raises ValueError and OSError."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > most:
            raise ValueError(f"a note of {length} bytes is too long")
        note = json.loads(self._exactly(length, deadline))
        if not isinstance(note, dict):
            raise ValueError("a note is a JSON object")
        return note

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more: Any = self._ssl.read(count - len(data))
            except ssl.SSLWantReadError:
                self._feed(deadline)
                continue
            data += more
        return bytes(data)

    def _feed(self, deadline: float) -> None:
        while (count := self._plain.read(self._received)) is None:
            _check(deadline)
        if not count:
            raise ConnectionResetError
        _check(deadline)
        self._in.write(self._received[:count])

    def _flush(self, deadline: float) -> None:
        while not self._send_unsent(self._plain.write):
            _check(deadline)

    # -- reading ----------------------------------------------------------------------------------

    def read(self, view: memoryview, fill: bool = False) -> int | None:
        got = 0
        while True:
            got += self._decrypt(view[got:])
            if got == len(view) or (got and not fill):
                return got
            count = self._plain.read(self._received)
            if not count:
                # An end without TLS's close_notify counts too: frames have a length, and a run
                # ends with a message.
                return got or count
            with self._lock:
                self._in.write(self._received[:count])

    def _decrypt(self, view: memoryview) -> int:
        """Fill `view` from the received records, one of at most 16 KiB at a time."""
        got = 0
        with self._lock:
            try:
                while got < len(view):
                    count: Any = self._ssl.read(len(view) - got, view[got:])  # type: ignore[arg-type]
                    if not count:
                        break
                    got += count
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                pass
            except ssl.SSLError as error:
                text = f"what came was changed on its way ({_reason(error)})"
                raise ConnectionError(text) from error
        return got

    # -- writing ----------------------------------------------------------------------------------

    def write(self, buffers: deque[memoryview]) -> int:
        return self._write(buffers, _PLAIN_BYTES, self._plain.write)

    def try_write(self, buffers: deque[memoryview], room: int) -> int:
        # `_write` holds a byte back, which takes at least two.
        if room < 2 or len(buffers[0]) < 2:
            return 0
        return self._write(
            buffers, room, lambda pending: self._plain.try_write(pending, _CIPHERTEXT_BYTES)
        )

    def _write(
        self, buffers: deque[memoryview], room: int, send: Callable[[deque[memoryview]], int]
    ) -> int:
        """Encrypt and send at most `room` bytes; returns how many count as written. Encrypted bytes
        go first. While some are left, one byte less counts, so the caller repeats this frame."""
        if not self._send_unsent(send):
            return 0
        done, self._owed = self._owed, 0
        taken = self._encrypt(buffers, done, room)
        if not self._send_unsent(send):
            self._owed = 1
        return done + taken - self._owed

    def _encrypt(self, buffers: deque[memoryview], skipped: int, room: int) -> int:
        """Encrypt `buffers` from byte `skipped` on, at most `room` bytes."""
        taken = 0
        small: list[memoryview] = []
        with self._lock:
            for view in buffers:
                part = view[skipped : skipped + room - taken]
                skipped = max(0, skipped - len(view))
                taken += len(part)
                if len(part) <= _JOINED_BYTES:
                    small.append(part)
                else:
                    self._encrypt_joined(small)
                    self._ssl.write(part)
                if taken == room:
                    break
            self._encrypt_joined(small)
            if encrypted := self._out.read():
                self._unsent.append(memoryview(encrypted))
        return taken

    def _encrypt_joined(self, small: list[memoryview]) -> None:
        if joined := b"".join(small):
            self._ssl.write(joined)
        small.clear()

    def _send_unsent(self, send: Callable[[deque[memoryview]], int]) -> bool:
        """Hand encrypted bytes to the system. Returns whether all of them are handed over."""
        with self._lock:
            if encrypted := self._out.read():  # of the handshake, or an answer of the reading side
                self._unsent.append(memoryview(encrypted))
        while self._unsent:
            sent = send(self._unsent)
            if not sent:
                return False
            drop_sent(self._unsent, sent)
        return True

    # -- the end ----------------------------------------------------------------------------------

    def end_writes(self) -> None:
        self._plain.end_writes()

    def abandon(self) -> None:
        self._plain.abandon()

    def stop(self) -> None:
        self._plain.stop()

    def close(self) -> None:
        self._plain.close()


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(errno.ETIMEDOUT, "it did not complete the handshake in time")
