"""Pairing: a machine gets its key, and a worker the configuration, with one pasted line.

`hetero invite` prints a token, HT1-<hash of the authority>-<one-time secret>, and listens.
`hetero join` connects, and then:

1. The inviting side sends the authority's certificate, which is no secret.
2. The joining side compares the certificate's hash with the token's. It has sent nothing before,
   and sends nothing where the hashes differ.
3. TLS begins. The inviting side shows the certificate of that authority's keeper: the coordinator,
   which invites workers, or the lighthouse, which invites islands.
4. The joining side makes a key, which never leaves it. It sends a signing request, an HMAC of the
   secret over the request, the secret's first bytes, which name the invitation, and the names of
   its devices.
5. It gets its certificate, its name and the configuration, if there is one, and confirms.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_framework.config import host_and_port, split_address
from hetero_framework.core import timeouts, tls
from hetero_framework.core.dial import REFUSED, connect
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import Identity
from hetero_framework.core.send_queue import drop_sent
from hetero_framework.core.stream import Stream
from hetero_framework.core.tls import TlsStream
from hetero_framework.errors import HeteroError, IdentityError, NetworkError
from hetero_framework.log import one_line
from hetero_framework.security import authority as x509
from hetero_framework.security.authority import Authority
from hetero_framework.security.certificates import sign
from hetero_framework.security.keys import KeyDirectory

GOOD_FOR_S = 15 * 60.0
MAX_WRONG = 5
_ALPN = "hetero-join/2"
_SECRET_BYTES = 16
_NAME_BYTES = 4
"""Bytes of the secret that name an invitation, so that a wrong try counts against it alone."""
_LENGTH = struct.Struct(">I")
_MAX_CERTIFICATE_BYTES = 4096
_MAX_ANSWER_BYTES = 4 << 20
_MOST_DEVICES = 64
_SILENT = "it says nothing"
_AGAIN = "have this machine invited again (hetero invite)"


@dataclass(frozen=True)
class Token:
    """The token that a person carries from one machine to the other."""

    authority: bytes  # SHA-256 of its certificate
    secret: bytes

    def __str__(self) -> str:
        return f"HT1-{_text(self.authority)}-{_text(self.secret)}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token in a pasted text. Raises IdentityError."""
        parts = text.strip().split("-")
        with suppress(ValueError):
            kind, authority, secret = parts
            token = cls(_bytes(authority), _bytes(secret))
            if (kind.upper(), len(token.authority), len(token.secret)) == ("HT1", 32, 16):
                return token
        raise IdentityError(
            "this is not a token of `hetero invite`, or not all of it",
            hint="copy the whole line that `hetero invite` has printed",
        )

    @property
    def name(self) -> str:
        """The name of the token's invitation: no secret, but others do not know it."""
        return self.secret[:_NAME_BYTES].hex()

    def proof(self, request: bytes) -> str:
        """The proof that the sender of this signing request knows the secret."""
        message = b"hetero join 1\0" + self.authority + request
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()


def _text(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _bytes(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))


@dataclass
class Invitation:
    """An invitation, good for one use until `until` (time.monotonic()) or MAX_WRONG mistakes."""

    process: WorkerId
    token: Token
    until: float
    wrong: int = 0
    taken: bool = False
    outcome: str | None = None  # why it is over

    def over(self, now: float) -> str | None:
        if self.outcome is None and not self.taken and now > self.until:
            self.outcome = "it has expired"
        return self.outcome


@dataclass(frozen=True)
class Configuration:
    """The file that a machine gets with its key."""

    name: str
    text: str


Configure = Callable[[WorkerId, str, Sequence[str]], Configuration]
"""Makes the file for a worker that joins from this host, with these devices."""


class Inviting:
    """The inviting side: a `Gate` that admits no peer, but hands out certificates."""

    encrypts: ClassVar[bool] = True

    def __init__(
        self,
        keys: KeyDirectory,
        authority: Authority,
        members: Iterable[WorkerId],
        configure: Configure | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._authority = authority
        self._configure = configure
        self._clock = clock
        self._lock = threading.Lock()
        hashed, until = _hash(authority.certificate_der), clock() + GOOD_FOR_S
        self.invitations = [
            Invitation(member, Token(hashed, secrets.token_bytes(_SECRET_BYTES)), until)
            for member in members
        ]

    @property
    def over(self) -> bool:
        """Whether all invitations are over."""
        return all(entry.over(self._clock()) for entry in self.invitations)

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        """Hold the whole conversation with a joining machine."""
        try:
            deadline = time.monotonic() + timeouts.STRANGER_S
            der = self._authority.certificate_der
            _write(stream, _LENGTH.pack(len(der)) + der, deadline)
            made = tls.context(self._keys.bundle("local"), server=True, alpn=_ALPN, anonymous=True)
            encrypted = TlsStream(stream, made, server=True, alpn=_ALPN)
            with tls.explained("it"):
                encrypted.shake_hands(deadline)
                name, request, proof, devices = _request(encrypted.receive_note(deadline))
                invitation = self._take(name, request, proof)
                if invitation is None:
                    encrypted.send_note({"refused": _REFUSED}, deadline)
                    raise IdentityError("the invitation is wrong, used or over")
                self._hand_over(encrypted, invitation, request, devices, deadline)
            kind = self._keys.kind
            return encrypted, Identity.of(self._authority.cluster, invitation.process, kind)
        except (OSError, HeteroError):
            stream.close()
            raise

    def _take(self, name: str, request: bytes, proof: str) -> Invitation | None:
        """The invitation of this name, if `proof` shows its secret; it is taken from now on.
        Nothing is remembered of names that no invitation has."""
        with self._lock:
            now = self._clock()
            for entry in self.invitations:
                if entry.over(now) or entry.taken or entry.token.name != name:
                    continue
                if hmac.compare_digest(entry.token.proof(request), proof):
                    entry.taken = True
                    return entry
                entry.wrong += 1
                if entry.wrong >= MAX_WRONG:
                    entry.outcome = f"somebody tried {MAX_WRONG} wrong tokens"
            return None

    def _hand_over(
        self,
        stream: TlsStream,
        invitation: Invitation,
        request: bytes,
        devices: Sequence[str],
        deadline: float,
    ) -> None:
        outcome, name = "somebody took it, but did not confirm", str(invitation.process)
        try:
            with self._lock:  # the list of certificates is one file
                certificate = sign(self._keys, self._authority, invitation.process, request)
                given = None
                if self._configure is not None:
                    host = split_address(stream.peer)[0]
                    given = self._configure(invitation.process, host, devices)
            answer = {
                self._keys.kind.member: name,
                "certificate": certificate.decode(),
                "authority": self._authority.certificate_pem.decode(),
            }
            if given is not None:
                answer.update(name=given.name, configuration=given.text)
            stream.send_note(answer, deadline)
            if stream.receive_note(deadline) != {"joined": name}:
                called = self._keys.kind.called(invitation.process)
                raise IdentityError(f"{called} did not confirm that it has joined")
            outcome = "used"
        finally:
            invitation.outcome = outcome


_REFUSED = "no open invitation has this token: it is used, over or of another `hetero invite`"


def _request(note: dict[str, Any]) -> tuple[str, bytes, str, list[str]]:
    """The name of an invitation, a signing request that is not checked yet, its proof, and the
    devices of the machine. Raises ValueError."""
    name, request, proof = (note.get(field) for field in ("invitation", "request", "proof"))
    if not (isinstance(name, str) and isinstance(request, str) and isinstance(proof, str)):
        raise ValueError("a signing request was expected")
    if not proof.isascii():
        raise ValueError("a proof is hexadecimal")
    devices = note.get("devices", [])
    if not (isinstance(devices, list) and all(isinstance(name, str) for name in devices)):
        raise ValueError("devices are a list of names")
    if len(devices) > _MOST_DEVICES or any(len(name) > _MOST_DEVICES for name in devices):
        raise ValueError("no machine has devices of such a number or name")
    return name, base64.b64decode(request, validate=True), proof, devices


@dataclass(frozen=True)
class PairedMachine:
    """What a joining machine gets: its identity, its key bundle, and a worker's configuration."""

    identity: Identity
    bundle: bytes
    configuration: Configuration | None


def join(
    host: str,
    port: int,
    token: Token,
    keep: Callable[[PairedMachine], None],
    devices: Sequence[str] = (),
    timeout_s: float = 15.0,
) -> PairedMachine:
    """Have this machine, which has these devices, join under its invited name. `keep` writes what
    the machine got, before it confirms. Raises IdentityError, and NetworkError when there is no
    answer."""

    def secure(stream: Stream) -> Stream:
        """Nothing is sent before the other side has shown the authority of the token."""
        try:
            deadline = time.monotonic() + timeouts.STRANGER_S
            with tls.explained("the machine there"):
                return _encrypted(stream, token, deadline)
        except (OSError, IdentityError):
            stream.close()
            raise

    try:
        stream = connect(host, port, timeout_s, who="the inviting machine", secure=secure)
    except NetworkError as error:
        if isinstance(error, IdentityError) or not any(
            reason in error.message for reason in (REFUSED, _SILENT)
        ):
            raise
        raise NetworkError(
            f"nobody is inviting at {host_and_port(host, port)}",
            hint="run `hetero invite ID` there (for an island: `hetero invite --island NAME`), and "
            "paste the line that it prints here while it waits",
        ) from error
    assert isinstance(stream, TlsStream)
    try:
        with tls.explained("the machine there"):
            return _ask(stream, token, keep, devices)
    except OSError as error:
        text = f"the invitation was cut short: {error.strerror or error}"
        raise IdentityError(text, hint=_AGAIN) from error
    finally:
        stream.close()


def _encrypted(stream: Stream, token: Token, deadline: float) -> TlsStream:
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size, deadline))
    der = b""
    if length <= _MAX_CERTIFICATE_BYTES:
        der = _read(stream, length, deadline)
    if not hmac.compare_digest(_hash(der), token.authority):
        raise IdentityError(
            "the machine there did not make this token",
            hint="check address and port; if they are right, somebody else answers in its place",
        )
    made = tls.joining_context(x509.pem_of(der), _ALPN)
    encrypted = TlsStream(stream, made, server=False, alpn=_ALPN)
    encrypted.shake_hands(deadline)
    peer = encrypted.certificate().identity
    if not peer.keeps:
        raise IdentityError(f"{peer} answers there, and only the {peer.kind.keeper} invites")
    return encrypted


def _ask(
    stream: TlsStream,
    token: Token,
    keep: Callable[[PairedMachine], None],
    devices: Sequence[str],
) -> PairedMachine:
    deadline = time.monotonic() + 2 * timeouts.STRANGER_S
    key = x509.new_key()
    request = x509.signing_request(key)
    encoded = base64.b64encode(request).decode()
    asked: dict[str, Any] = {"invitation": token.name, "request": encoded}
    asked |= {"proof": token.proof(request), "devices": [*devices]}
    stream.send_note(asked, deadline)
    answer = stream.receive_note(deadline, _MAX_ANSWER_BYTES)
    if (refused := answer.get("refused")) is not None:
        raise IdentityError(f"not invited: {one_line(str(refused))}", hint=_AGAIN)
    inviting = stream.certificate().identity
    fields = (inviting.kind.member, "certificate", "authority")
    process, certificate, authority = (str(answer.get(field)) for field in fields)
    identity = Identity.parse(Identity.of(inviting.cluster, process, inviting.kind).uri)
    if _hash(x509.der_of(authority)) != token.authority:
        raise ValueError("another authority than the token's")
    bundle = x509.received_bundle(key, certificate, authority, identity)
    configuration = None
    if "configuration" in answer:
        configuration = Configuration(
            one_line(str(answer.get("name"))), str(answer["configuration"])
        )
    joined = PairedMachine(identity, bundle, configuration)
    keep(joined)
    stream.send_note({"joined": process}, deadline)
    return joined


def _hash(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


def _read(stream: Stream, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes, before encryption begins."""
    data = memoryview(bytearray(count))
    got = 0
    while got < count:
        more = stream.read(data[got:])
        if more == 0:
            raise ConnectionResetError
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, _SILENT)
        got += more or 0
    return bytes(data)


def _write(stream: Stream, data: bytes, deadline: float) -> None:
    pending = deque([memoryview(data)])
    while pending:
        drop_sent(pending, stream.write(pending))
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "it takes nothing")
