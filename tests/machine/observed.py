"""A fence store that is watched: what no store may ever do is caught where it happens."""

from __future__ import annotations

from typing import Any

from ragfence.core.decisions import Granted, Mode, Sealed
from ragfence.core.layout import State
from ragfence.stores.fences import Lookup


class Watcher:
    """What was given out so far, by whichever server was the primary then."""

    def __init__(self) -> None:
        self.primary: Any = None
        self.grants: dict[bytes, tuple[Any, bytes]] = {}
        self.fences: dict[tuple[int, Any], bytes] = {}

    def granted(self, store: Any, place: bytes, record: Any, shard: int) -> None:
        spot = (shard, record.fence)
        holder = self.fences.setdefault(spot, record.token)
        assert holder == record.token, f"the fence {record.fence} was given to two tokens"
        if store is not self.primary:
            return  # a server that was split off may still give out old numbers; they are never sealed
        last = self.grants.get(place)
        if last is not None and last[1] != record.token:
            assert last[0] < record.fence, f"the fence of a source went from {last[0]} to {record.fence}"
        self.grants[place] = (record.fence, record.token)


class Observed:
    def __init__(self, store: Any, watcher: Watcher) -> None:
        self._store = store
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def claim(self, claims: Any) -> Any:
        verdicts = self._store.claim(claims)
        for claim, verdict in zip(claims, verdicts, strict=True):
            if isinstance(verdict, Granted):
                place = claim.source or claim.key
                self._watcher.granted(self, place, verdict.record, claim.key[0])
        return verdicts

    def seal(self, seals: Any) -> Any:
        lookups = [Lookup(seal.key, seal.mode, seal.source) for seal in seals]
        before = self._store.read(lookups)
        outcomes = self._store.seal(seals)
        for seal, held, outcome in zip(seals, before, outcomes, strict=True):
            if isinstance(outcome, Sealed):
                assert _current(held, seal), f"{seal.token.hex()} sealed without being the current token"
        return outcomes


def _current(held: Any, seal: Any) -> bool:
    pending = (
        held.record if seal.mode is Mode.KEYED else (held.source and held.source.lease and held.source.lease.record)
    )
    if pending and pending.state is State.HELD and pending.token == seal.token:
        return True
    head = held.source.head.record if held.source and held.source.head else None
    return any(ended and ended.ended and ended.token == seal.token for ended in (held.record, head))
