"""Limits for slow and idle connections, and a share of connections for each address.

uvicorn waits without limit for the headers of a request, and for a client to read its answer. Here the headers have to
arrive within `header_timeout_s`, and an answer has to be read at a minimum rate. Bytes that the parser cannot read end
their own connection and no other.

The number of connections, and the bytes that the server holds for them, are shared between addresses: an address may
have at most `share` times what is free, as a tenant may once the caller is known (`fair_shares`). An address that has
its share of connections loses the one that has been idle longest, or gets no more if all are in use. An address that
has its share of bytes loses the connection that has held bytes longest.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from ragfence._extras import needs_extra
from ragfence.server.fair_shares import Shares
from ragfence.server.load_shedding import headers_too_large
from ragfence.server.throttle import address_of
from ragfence.wire.messages import Answer
from ragfence.wire.problems import Problem, refusal

Amount = TypeVar("Amount", int, None)

SMALL: Final = 4 << 10
"""Bytes of a connection that are not counted: the number of connections limits them."""


class Holder(Hashable, Protocol):
    """A connection."""

    def held_bytes(self) -> int:
        """Returns the bytes of an incomplete head and of unsent answers."""
        ...

    def evict(self) -> None:
        """Closes the connection, which is not counted any more."""
        ...


class Addresses:
    """The addresses of one process, in its event loop. An address is here for as long as it has connections."""

    def __init__(self, *, max_connections: int, max_held_bytes: int, share: float = 1.0) -> None:
        self._places = Shares(max_connections, share=share)
        self._bytes = Shares(max_held_bytes, share=share)
        self._address: dict[Holder, str] = {}
        # In order: the oldest is first.
        self._idle: dict[str, dict[Holder, None]] = {}
        self._holders: dict[str, dict[Holder, int]] = {}

    def enter(self, connection: Holder, address: str) -> bool:
        """Returns whether there is room for the connection, which is idle at first."""
        while not self._places.take(address):
            idle = self._idle.get(address)
            if not idle:
                return False
            self._evict(next(iter(idle)))
        self._address[connection] = address
        self._idle.setdefault(address, {})[connection] = None
        return True

    def leave(self, connection: Holder) -> None:
        address = self._address.pop(connection, None)
        if address is None:
            return
        self._places.give(address)
        _discard(self._idle, address, connection)
        self._bytes.change(address, -(_discard(self._holders, address, connection) or 0))

    def begin(self, connection: Holder) -> None:
        """A request is in progress: the connection is not idle."""
        if (address := self._address.get(connection)) is not None:
            _discard(self._idle, address, connection)

    def end(self, connection: Holder) -> None:
        """The request is answered: the connection is idle."""
        if (address := self._address.get(connection)) is not None:
            self._idle.setdefault(address, {})[connection] = None

    def weigh(self, connection: Holder) -> None:
        """Counts the bytes that the connection holds now, and makes room for them."""
        if (address := self._address.get(connection)) is None:
            return
        self._count(address, connection)
        while self._bytes.is_exceeded(address):
            holders = self._holders[address]
            oldest = next(iter(holders))
            if self._count(address, oldest):  # it holds less than was counted
                continue
            if len(holders) == 1:
                return  # a single one may hold what it needs: every request and every answer has its own limit
            self._evict(oldest)

    def _count(self, address: str, connection: Holder) -> bool:
        """Returns whether the connection holds fewer bytes than before."""
        before, now = self._holders.get(address, {}).get(connection, 0), connection.held_bytes()
        if now > SMALL:
            self._holders.setdefault(address, {})[connection] = now
        else:
            now = 0
            _discard(self._holders, address, connection)
        self._bytes.change(address, now - before)
        return now < before

    def _evict(self, connection: Holder) -> None:
        self.leave(connection)
        connection.evict()


def _discard(groups: dict[str, dict[Holder, Amount]], address: str, connection: Holder) -> Amount | None:
    """Removes the connection from its group, and the group if it is empty."""
    if (group := groups.get(address)) is None:
        return None
    found = group.pop(connection, None)
    if not group:
        del groups[address]
    return found


with needs_extra("api", "`ragfence serve`"):
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ModuleNotFoundError:  # h11 works as well, only slower
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

_log = logging.getLogger("ragfence.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections."""

    max_connections: int = 4096
    max_held_bytes: int = 512 << 20
    """Bytes of incomplete heads and unread answers, of all connections."""
    address_share: float = 1.0
    """An address may have at most this many times what is free of both."""
    header_timeout_s: float = 10.0
    max_head_bytes: int = 64 << 10
    send_timeout_s: float = 30.0
    min_send_rate: int = 1 << 10
    """Bytes per second that a client has to read, while there are bytes to read."""


class _Connection:
    """The limits, mixed into both protocols of uvicorn."""

    config: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None
    cycle: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._limits: ConnectionLimits = self.config.serving.connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._addresses: Addresses = self.config.addresses
        if self._addresses.enter(self, address_of(self.client)):
            self._start_head_timer()
        else:
            detail = "there are too many connections, of this address or of all"
            self._refuse(refusal("DEPENDENCY.overloaded", detail, retry_after=random.randint(1, 4)))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._send_timer = None
        self._addresses.leave(self)
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)  # type: ignore[misc]
        except (h11.LocalProtocolError, AttributeError, TypeError, ValueError):
            _log.warning("a connection sent bytes that cannot be parsed", exc_info=True)
            self.transport.abort()
        if self._is_busy():
            self._complete_head()
            self._addresses.begin(self)
            return
        # Parts of a head, or of a body that was refused and is discarded.
        self._head_bytes += len(data)
        self._addresses.weigh(self)
        self._start_head_timer()
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse(headers_too_large(f"at most {self._limits.max_head_bytes:,} bytes of headers are accepted"))

    def send_400_response(self, msg: str) -> None:
        # During an answer, or before one that another request waits for, the client would take it for that answer.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._refuse(refusal("VALIDATION.header", "the request is not HTTP/1.1", hint="send HTTP/1.1"))
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._addresses.weigh(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if not self._is_busy():  # it may have the next request, which was sent before this answer
            self._addresses.end(self)
        self._start_send_timer()

    def held_bytes(self) -> int:
        return self._head_bytes + self.transport.get_write_buffer_size()

    def evict(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for the client to read
        else:
            self.transport.close()

    def shutdown(self) -> None:
        try:
            super().shutdown()  # type: ignore[misc]
        except h11.LocalProtocolError:  # it is already broken
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """No warning in the log: the request is answered as a request without the upgrade."""

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._time_out_head)

    def _complete_head(self) -> None:
        if self._head_bytes:
            self._head_bytes = 0
            self._addresses.weigh(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out_head(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(refusal("VALIDATION.slow_client", "the headers were not complete in time"))
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Closes the connection, with a problem unless an answer was sent before: it might be taken for another one."""
        if self.cycle is None and not self.transport.is_closing():
            self.transport.write(_to_http(problem.answer({"connection": "close"})))
        self.transport.close()
        self._start_send_timer()

    def _start_send_timer(self) -> None:
        """Starts the time within which the client has to read some of the unsent bytes."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            if self._unsent > SMALL:
                self._addresses.weigh(self)
            self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._check_sent)

    def _check_sent(self) -> None:
        self._send_timer = None
        left = self.transport.get_write_buffer_size()
        self._addresses.weigh(self)
        enough = min(self._unsent, int(self._limits.min_send_rate * self._limits.send_timeout_s))
        if left and self._unsent - left < enough:
            self.transport.abort()  # closing would wait for the client to read
        elif left:
            self._start_send_timer()


class H11Connection(_Connection, H11Protocol):
    pass


if HttpToolsProtocol is not None:

    class HttpToolsConnection(_Connection, HttpToolsProtocol):
        pass


def fastest_protocol() -> type[asyncio.Protocol]:
    return H11Connection if HttpToolsProtocol is None else HttpToolsConnection


def _to_http(answer: Answer) -> bytes:
    phrase = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
    lines = [f"HTTP/1.1 {answer.status} {phrase.get(answer.status, 'Service Unavailable')}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body
