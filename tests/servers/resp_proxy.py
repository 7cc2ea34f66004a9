"""A TCP proxy in front of a real Redis server that alters its replies: short, long, broken, of another kind, twice."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.servers.daemons import HOST

Alter = Callable[[bytes, bytes], bytes]
"""of the commands that were sent last, and a whole reply: what the client gets"""


class RespProxy:
    """Replies pass as they are until `alter` is set."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self.alter: Alter | None = None
        self.altered = 0
        self._listener = socket.create_server((HOST, 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self._listener.getsockname()[1]}/0"

    @property
    def connections(self) -> int:
        return len(self._open) // 2

    def once(self, alter: Alter) -> None:
        """The first reply that is changed by it, and none after that."""

        def first(sent: bytes, reply: bytes) -> bytes:
            after = alter(sent, reply)
            if after != reply:
                self.alter = None
            return after

        self.altered, self.alter = 0, first

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
                self._open += (client, server)
                sent = [b""]
                threading.Thread(target=self._ask, args=(client, server, sent), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, sent), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, sent: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                sent[0] = data
                server.sendall(data)
        _hang_up(server)

    def _answer(self, server: socket.socket, client: socket.socket, sent: list[bytes]) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                held += data
                out = b""
                while (end := frame_end(held, 0)) is not None:
                    reply, held = held[:end], held[end:]
                    after = self.alter(sent[0], reply) if self.alter else reply
                    self.altered += after != reply
                    out += after
                client.sendall(out)
        _hang_up(client)


def frame_end(data: bytes, at: int) -> int | None:
    """Where the reply that begins here ends; None: not all of it is there."""
    line = data.find(b"\r\n", at)
    if line < 0:
        return None
    kind, told = data[at : at + 1], data[at + 1 : line]
    if kind == b"$":
        whole = line + 2 + (int(told) + 2 if int(told) >= 0 else 0)
        return whole if whole <= len(data) else None
    end: int | None = line + 2
    for _ in range(int(told) if kind == b"*" else 0):
        end = frame_end(data, end) if end is not None else None
    return end


def elements(reply: bytes) -> list[bytes]:
    """Of an array."""
    at = reply.find(b"\r\n") + 2
    found = []
    while at < len(reply):
        end = frame_end(reply, at)
        assert end is not None
        found.append(reply[at:end])
        at = end
    return found


def array(parts: list[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


@contextlib.contextmanager
def resp_proxy(host: str, port: int) -> Iterator[RespProxy]:
    proxy = RespProxy((host, port))
    try:
        yield proxy
    finally:
        proxy.close()


def _hang_up(there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        there.shutdown(socket.SHUT_RDWR)
