"""Connections by address: their number, and the bytes that the server holds for them, are shared between addresses.

An address may have at most `share` times what is still free, as tenants do once the caller is known (`shares`). What
waits for longest makes room: with its share of connections, an address loses the one that was idle for longest, or
gets no more if all are in use; with its share of bytes, it loses the connection that has held on to them for longest.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol, TypeVar

from ragfence.server.fair_shares import Shares

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
