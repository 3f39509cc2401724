"""A TCP proxy that does what bad networks do, for tests.

    with FaultProxy(("127.0.0.1", port)) as proxy:
        connect("127.0.0.1", proxy.port, ...)
        proxy.up.cut_after = 100

`up` is from the connecting side to the target, `down` the way back. Faults may be set before or
during a connection; byte counts run over all connections since the proxy started.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass

_CHUNK_BYTES = 65_536
_TICK_S = 0.02


@dataclass
class Faults:
    """What happens to one direction. `seen` counts the bytes that were passed on."""

    delay_s: float = 0.0  # wait before each piece is passed on
    slice_bytes: int = 0  # pass on pieces of at most so many bytes
    cut_after: int | None = None  # close both sides in order after so many bytes
    reset_after: int | None = None  # close both sides with RST after so many bytes
    flip_at: int | None = None  # invert the lowest bit of the byte at this offset
    blackhole: bool = False  # pass nothing on, and let nobody know
    seen: int = 0


class FaultProxy:
    """Listens on 127.0.0.1:`port` and passes every connection on to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.up = Faults()
        self.down = Faults()
        self._target = target
        self._stop = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TICK_S)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="proxy acceptor")
        self._acceptor.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close everything and wait for the threads."""
        self._stop.set()
        self._acceptor.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def reset(self) -> None:
        """Close every present connection with RST."""
        for sock in list(self._sockets):
            _reset(sock)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near = self._listener.accept()[0]
            except TimeoutError:
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for source, sink, faults in ((near, far, self.up), (far, near, self.down)):
                source.settimeout(_TICK_S)
                thread = threading.Thread(
                    target=self._pump, args=(source, sink, faults), name="proxy pump"
                )
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, faults: Faults) -> None:
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                if faults.blackhole:
                    self._stop.wait(_TICK_S)
                    continue
                try:
                    data = source.recv(_CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if not self._pass_on(bytearray(data), source, sink, faults):
                    return

    def _pass_on(
        self, data: bytearray, source: socket.socket, sink: socket.socket, faults: Faults
    ) -> bool:
        step = faults.slice_bytes or len(data)
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            if faults.delay_s:
                self._stop.wait(faults.delay_s)
            while faults.blackhole and not self._stop.is_set():
                self._stop.wait(_TICK_S)
            if faults.flip_at is not None and 0 <= faults.flip_at - faults.seen < len(piece):
                piece[faults.flip_at - faults.seen] ^= 1
            for limit, end in ((faults.cut_after, _close), (faults.reset_after, _reset)):
                if limit is not None and faults.seen + len(piece) >= limit:
                    self._send(sink, piece[: max(0, limit - faults.seen)])
                    faults.seen = limit
                    end(sink)
                    end(source)
                    return False
            if not self._send(sink, piece):
                return False
            faults.seen += len(piece)
        return True

    def _send(self, sink: socket.socket, piece: bytearray) -> bool:
        view = memoryview(piece)
        while view and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                view = view[sink.send(view) :]
        return not view


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Only closing sends the RST; a thread that waits in recv keeps a plain close from it.
        sock.shutdown(socket.SHUT_RD)
        sock.close()
