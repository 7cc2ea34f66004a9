"""Wrong credentials are counted, logged at intervals, and limited per address.

Every address has a budget of wrong tokens, which refills. Once it is used up, tokens that this process does not know
are answered with 429 without reading the store. Keys that were accepted before are not affected, whatever else comes
from the same address: all clients behind a proxy or a NAT have the same one.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cachetools import LRUCache

BURST: Final = 50
"""Wrong tokens of one address before it is slowed down."""
PER_S: Final = 10.0
"""Wrong tokens of one address per second after that."""
LOG_EVERY_S: Final = 60.0
"""Each address is logged at most once in this time."""
LOG_LINES: Final = 100
"""The largest number of lines in that time, for all addresses together."""
MAX_ADDRESSES: Final = 10_000

_log = logging.getLogger("ragfence.server")


@dataclass(slots=True)
class _Source:
    """The budget of one address, and the number of its refusals that are not logged yet."""

    budget: float
    at: float
    unlogged: int = 0
    logged_at: float = -math.inf


class FailureThrottle:
    """The addresses of one process. There are at most `max_addresses`; the least recently used one is dropped."""

    def __init__(
        self,
        *,
        burst: int = BURST,
        per_s: float = PER_S,
        max_addresses: int = MAX_ADDRESSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: LRUCache[str, _Source] = LRUCache(max_addresses)
        self._window_at = -math.inf
        self._lines = 0

    def wait_s(self, address: str) -> int:
        """Returns how many whole seconds the address should wait; 0 while it has budget left."""
        with self._lock:
            source = self._sources.get(address)
            if source is None:
                return 0
            self._refill(source)
            return 0 if source.budget >= 1 else max(1, math.ceil((1 - source.budget) / self._per_s))

    def fail(self, address: str, reason: str, key_id: str = "", *, spend: bool = True) -> None:
        """Counts a refusal, and logs it unless the address was logged recently. The line contains no secret."""
        with self._lock:
            source = self._sources.get(address)
            if source is None:
                source = self._sources[address] = _Source(float(self._burst), self._clock())
            self._refill(source)
            if spend:
                source.budget = max(0.0, source.budget - 1)
            source.unlogged += 1
            if not self._may_log(source):
                return
            count, source.unlogged = source.unlogged, 0
        _log.warning(
            "refused credentials from %s: %s%s (%d since the last line about this address)",
            address,
            reason,
            f", API key {key_id}" if key_id else "",
            count,
        )

    def _refill(self, source: _Source) -> None:
        now = self._clock()
        source.budget = min(float(self._burst), source.budget + (now - source.at) * self._per_s)
        source.at = now

    def _may_log(self, source: _Source) -> bool:
        now = self._clock()
        if now - self._window_at >= LOG_EVERY_S:
            self._window_at, self._lines = now, 0
        if now - source.logged_at < LOG_EVERY_S or self._lines >= LOG_LINES:
            return False
        source.logged_at, self._lines = now, self._lines + 1
        return True


def address_of(client: tuple[str, int] | None) -> str:
    """Returns the address of a connection; for IPv6 its /64 network, which usually belongs to one host.

    >>> address_of(("2001:db8::1", 5)), address_of(("192.0.2.7", 5)), address_of(None)
    ('2001:db8::/64', '192.0.2.7', 'unknown')
    """
    if client is None:
        return "unknown"
    try:
        parsed = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0][:64]
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
