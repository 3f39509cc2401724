"""The endpoint's HTTP, on the loopback or over TLS, to clients that have its key.

Requests from a page in a browser (with an Origin) and by a foreign name are refused. Of many
connections that have not said anything yet, the oldest give way.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import sys
import tempfile
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hetero_framework.core import tls
from hetero_framework.core.addresses import LOOPBACK, family, is_local_address, parsed
from hetero_framework.core.files import write_file, write_private
from hetero_framework.errors import ConfigError, HeteroError, NetworkError, in_words
from hetero_framework.extras.tinker.journal import MOST_BYTES
from hetero_framework.extras.tinker.service import Refused, Service
from hetero_framework.file_trust import read_own
from hetero_framework.security.keys import KeyDirectory

_SILENCE_S = 60.0
_MOST_SILENT = 128  # connections that wait for a request
_OPEN = ("client/config", "healthz")
_log = logging.getLogger(__name__)


def key_in(folder: Path) -> str:
    """The endpoint's API key, which stays the same; the client asks for this prefix."""
    file = folder / "api_key"
    with suppress(FileNotFoundError):
        return read_own(file).decode().strip()
    key = f"tml-{secrets.token_urlsafe(24)}"
    write_private(file, key.encode() + b"\n")
    return key


def encryption_for(host: str, keys: KeyDirectory, folder: Path) -> tuple[Any, Path]:
    """TLS for an endpoint at `host`, with a new key, and the file in `folder` with the certificate
    that clients are to trust. Raises ConfigError for what is no address or name of this machine,
    and IdentityError where the cluster's authority is not on this machine."""
    from hetero_framework.security.certificates import read_authority  # needs cryptography

    address = parsed(host)
    if not is_local_address(host) or (address is not None and address.is_unspecified):
        raise ConfigError(
            f"--host is {host}, which is no address or name of this machine",
            hint="name the one by which clients reach it",
        )
    authority = read_authority(keys)
    with tempfile.TemporaryDirectory() as place:
        write_private(Path(place, "key"), authority.issue_for_host(host))
        made = tls.context(Path(place, "key"), server=True, alpn="http/1.1", anonymous=True)
    write_file(trusted := folder / "trusted.pem", authority.certificate_pem)
    return made, trusted


class Endpoint(ThreadingHTTPServer):
    """Serves within its `with` block: at `host` over TLS, or on the loopback. Raises NetworkError
    where it cannot listen."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        service: Service,
        key: str,
        port: int = 0,
        host: str = LOOPBACK,
        encryption: Any = None,
    ) -> None:
        self.address_family = family(host)
        try:
            super().__init__((host, port), _ClientRequest)
        except OSError as error:
            text = f"the endpoint cannot listen on {host}:{port}: {in_words(error)}"
            raise NetworkError(text, hint="take another port with --port N") from error
        self.service, self.key, self._encryption = service, key, encryption
        self.name = f"[{host}]" if ":" in host else host
        scheme = "http" if encryption is None else "https"
        self.address = f"{scheme}://{self.name}:{self.server_address[1]}"
        self._silent: dict[Any, None] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="endpoint")

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def waits(self, connection: Any, *, silent: bool) -> None:
        """Note whether a connection waits for a request; of too many the oldest is closed."""
        with self._lock:
            self._silent.pop(connection, None)
            if silent:
                self._silent[connection] = None
            if len(self._silent) > _MOST_SILENT:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                with suppress(OSError):
                    below: Any = super(type(oldest), oldest)  # of TLS, which another thread uses
                    below.shutdown(2)

    def server_bind(self) -> None:
        super(HTTPServer, self).server_bind()  # without a question to a name server

    def get_request(self) -> tuple[Any, Any]:
        """A connection; its thread shakes hands, not the one that accepts."""
        plain, address = super().get_request()
        if self._encryption is None:
            return plain, address
        how: dict[str, Any] = {"server_side": True, "do_handshake_on_connect": False}
        return self._encryption.wrap_socket(plain, **how), address

    def process_request(self, request: Any, client_address: Any) -> None:
        self.waits(request, silent=True)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.waits(request, silent=False)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what is a fault here; connections that break are none."""
        if not isinstance(error := sys.exc_info()[1], OSError):
            _log.error("a request of a client failed here", exc_info=error)


class _ClientRequest(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hetero", ""
    timeout = _SILENCE_S
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        try:
            path = self.path.partition("?")[0].removeprefix("/api/v1/")
            self._check(path)
            body = self._body()
            self.server.waits(self.connection, silent=False)
            self._say(200, self.server.service.handle(path, body))
        except Refused as refused:
            if refused.status != 408:
                _log.info("refused a request: %s", refused)
            self._say(refused.status, {"detail": str(refused), "queue_state": "active"})
        except HeteroError as error:
            self._say(500, {"detail": error.message})
        self.server.waits(self.connection, silent=True)

    do_GET = do_POST

    def _check(self, path: str) -> None:
        hosts, given = self.headers.get_all("Host", []), self.headers.get("X-API-Key", "")
        known = rf"({re.escape(self.server.name)}|localhost)(:\d{{1,5}})?"
        if len(hosts) != 1 or not re.fullmatch(known, hosts[0], re.IGNORECASE):
            raise self._closing(421, f"the endpoint answers to its name only, {self.server.name}")
        if "Origin" in self.headers:
            raise self._closing(403, "requests from a page in a browser are refused")
        if path in _OPEN and self.command == "GET":
            return
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.key.encode()):
            raise self._closing(401, "the API key is wrong: TINKER_API_KEY is what the server says")

    def _closing(self, status: int, reason: str) -> Refused:
        """A refusal after which the connection is closed, since its body is not read."""
        self.close_connection = True
        return Refused(status, reason)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"\d{1,18}", length):
            raise self._closing(411, "a request needs a Content-Length")
        if int(length) > MOST_BYTES:
            raise self._closing(413, f"a body has {length} bytes, and {MOST_BYTES} is the most")
        if "Content-Encoding" in self.headers:
            raise self._closing(415, "compressed bodies are not read")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise self._closing(400, "the body ended early")
        return body

    def _say(self, status: int, answer: bytes | dict[str, Any]) -> None:
        is_bytes = isinstance(answer, bytes)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "application/x-protobuf" if is_bytes else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
