"""Connections that cannot be held for nothing: uvicorn's own, with limits.

uvicorn waits for ever for the headers of a request, and for a client to read its answer. Here the headers have to be
there within `header_timeout_s`, an answer has to be read at a certain rate, and connections are counted: each address
has a share of their number, and of the bytes that are held for them (`addresses`). Bytes that no parser understands end
their own connection and no other.

Connections by address: their number, and the bytes that the server holds for them, are shared between addresses.

An address may have at most `share` times what is still free, as tenants do once the caller is known (`shares`). What
waits for longest makes room: with its share of connections, an address loses the one that was idle for longest, or
gets no more if all are in use; with its share of bytes, it loses the connection that has held on to them for longest.
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
"""bytes that are not counted: there are no more of them than connections"""


class Holder(Hashable, Protocol):
    """A connection."""

    def held_bytes(self) -> int:
        """What came of a request that cannot begin yet, and what is unsent of answers."""
        ...

    def evict(self) -> None:
        """Closes it. It has left already."""
        ...


class Addresses:
    """Of one process, in its event loop. An address appears here for as long as it has connections."""

    def __init__(self, *, most: int, max_held_bytes: int, share: float = 1.0) -> None:
        self._places = Shares(most, share=share)
        self._bytes = Shares(max_held_bytes, share=share)
        self._address: dict[Holder, str] = {}
        # Ordered: what has been there for longest is first.
        self._idle: dict[str, dict[Holder, None]] = {}
        self._holders: dict[str, dict[Holder, int]] = {}

    def enter(self, connection: Holder, address: str) -> bool:
        """Whether there is room for it. It is idle, to begin with."""
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
        """A request is under way: it is not idle."""
        if (address := self._address.get(connection)) is not None:
            _discard(self._idle, address, connection)

    def end(self, connection: Holder) -> None:
        """The request has been answered."""
        if (address := self._address.get(connection)) is not None:
            self._idle.setdefault(address, {})[connection] = None

    def weigh(self, connection: Holder) -> None:
        """Counts the bytes that it holds now, and makes room for them."""
        if (address := self._address.get(connection)) is None:
            return
        self._count(address, connection)
        while self._bytes.is_exceeded(address):
            holders = self._holders[address]
            oldest = next(iter(holders))
            if self._count(address, oldest):  # it holds less than it was known to
                continue
            if len(holders) == 1:
                return  # one alone may hold what it needs; every request and every answer has a limit of its own
            self._evict(oldest)

    def _count(self, address: str, connection: Holder) -> bool:
        """Whether it holds less than before."""
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
    """Out of its group, and the group with it if nothing else is left there."""
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
except ModuleNotFoundError:  # h11 does as well, only slower
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

_log = logging.getLogger("ragfence.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a connection may take of the server."""

    most: int = 4096
    max_held_bytes: int = 512 << 20
    """of unfinished heads and unread answers, of all connections"""
    address_share: float = 1.0
    """an address may have at most so many times what is free of both"""
    header_timeout_s: float = 10.0
    max_head_bytes: int = 64 << 10
    send_timeout_s: float = 30.0
    min_send_rate: int = 1 << 10
    """bytes a second that a client has to read, while there is something for it to read"""


class _Connection:
    """What both protocols of uvicorn lack; mixed into each of them. Told apart by nothing but `cycle`."""

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
            self._expect_a_head()
        else:
            detail = "there are too many connections, of this address or of all"
            self._hang_up(refusal("DEPENDENCY.overloaded", detail, retry_after=random.randint(1, 4)))

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
            _log.warning("a connection sent what no parser understands", exc_info=True)
            self.transport.abort()
        if self._is_busy():
            self._head_is_there()
            self._addresses.begin(self)
            return
        # Parts of a head; or of a body that was refused, and is thrown away.
        self._head_bytes += len(data)
        self._addresses.weigh(self)
        self._expect_a_head()
        if self._head_bytes > self._limits.max_head_bytes:
            self._hang_up(headers_too_large(f"at most {self._limits.max_head_bytes:,} bytes of headers are taken"))

    def send_400_response(self, msg: str) -> None:
        # In the midst of an answer, or before the one that another request waits for, it would be taken for that one.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._hang_up(refusal("VALIDATION.header", "this is not HTTP/1.1", hint="send HTTP/1.1"))
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._expect_to_be_read()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._addresses.weigh(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if not self._is_busy():  # with the next request, which was sent before this answer
            self._addresses.end(self)
        self._expect_to_be_read()

    def held_bytes(self) -> int:
        return self._head_bytes + self.transport.get_write_buffer_size()

    def evict(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait until it is read
        else:
            self.transport.close()

    def shutdown(self) -> None:
        try:
            super().shutdown()  # type: ignore[misc]
        except h11.LocalProtocolError:  # it is broken already
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Nobody has to be told in the log: it is answered as the request that it also is."""

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_a_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._no_head)

    def _head_is_there(self) -> None:
        if self._head_bytes:
            self._head_bytes = 0
            self._addresses.weigh(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _no_head(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._hang_up(refusal("VALIDATION.slow_client", "the headers were not complete in time"))
        else:
            self.transport.close()

    def _hang_up(self, problem: Problem) -> None:
        """With a word of explanation, unless an answer was given before: then it might be taken for another's."""
        if self.cycle is None and not self.transport.is_closing():
            self.transport.write(_on_the_wire(problem.answer({"connection": "close"})))
        self.transport.close()
        self._expect_to_be_read()

    def _expect_to_be_read(self) -> None:
        """From now on, what is unsent has to become less."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            if self._unsent > SMALL:
                self._addresses.weigh(self)
            self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._is_it_read)

    def _is_it_read(self) -> None:
        self._send_timer = None
        left = self.transport.get_write_buffer_size()
        self._addresses.weigh(self)
        enough = min(self._unsent, int(self._limits.min_send_rate * self._limits.send_timeout_s))
        if left and self._unsent - left < enough:
            self.transport.abort()  # closing would wait until it is read
        elif left:
            self._expect_to_be_read()


class H11Connection(_Connection, H11Protocol):
    pass


if HttpToolsProtocol is not None:

    class HttpToolsConnection(_Connection, HttpToolsProtocol):
        pass


def quickest() -> type[asyncio.Protocol]:
    return H11Connection if HttpToolsProtocol is None else HttpToolsConnection


def _on_the_wire(answer: Answer) -> bytes:
    phrase = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
    lines = [f"HTTP/1.1 {answer.status} {phrase.get(answer.status, 'Service Unavailable')}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body
