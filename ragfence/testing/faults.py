"""Stores that fail on command: the orders that faulty stores take, and `FaultyFences`, which takes them.

fences = FaultyFences(MemoryFences())
fences.on("seal").fail_after()                  # sealed, but the reply is lost
fences.on("claim", match="07*").delay(0.2)      # only claims with a key in shard 7
fences.calls["claim"]                           # round trips, failed ones too
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Generic, Literal, TypeVar

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, HeadQuery, HeldRecords, LeaseRef, Seal, SealOutcome, Verdict
from ragfence.core.layout import digest_in
from ragfence.core.records import Head
from ragfence.core.tallies import Tallies
from ragfence.errors import StoreUnavailable
from ragfence.stores.fences import FenceStore, Loaded, LoadedSource, Lookup, Marker, Replays, RowEntry, Scanned, Stats

Error = BaseException | type[BaseException]
Answer = TypeVar("Answer")
Method = TypeVar("Method", bound=str)


@dataclass(slots=True, eq=False)
class Fault:
    """One order given with `.on(...)`; `hits` counts how often it struck."""

    method: str
    match: str
    kind: Literal["before", "after", "delay", "hold"]
    times: int | None = None
    error: Error | None = None
    seconds: float = 0.0
    hits: int = 0


class Orders:
    """What `.on(...)` of a faulty store returns: says what shall happen to the calls it names."""

    def __init__(self, give: Callable[[Fault], Fault], method: str, match: str) -> None:
        self._give, self._method, self._match = give, method, match

    def fail_before(self, times: int | None = 1, error: Error | None = None) -> Fault:
        """The call fails and the store did not act. `times=None` is for ever."""
        return self._give(Fault(self._method, self._match, "before", times, error))

    def fail_after(self, times: int | None = 1, error: Error | None = None) -> Fault:
        """The store acts and the reply is lost."""
        return self._give(Fault(self._method, self._match, "after", times, error))

    def delay(self, seconds: float, times: int | None = None) -> Fault:
        return self._give(Fault(self._method, self._match, "delay", times, seconds=seconds))


class FaultyCalls(Generic[Method]):
    """What every faulty store is made of: it counts calls and strikes those it has orders for.

    Of several orders that fit a call all delays count, then the first failure given.
    """

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.calls: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._sleep = sleep

    def on(self, method: Method, match: str = "*") -> Orders:
        return Orders(self._give, method, match)

    def heal(self) -> None:
        """Forgets all orders."""
        with self._lock:
            self._faults.clear()

    def _give(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _call(
        self,
        method: Method,
        names: Sequence[str],
        act: Callable[[], Answer],
        struck_by: Callable[[Fault], None] = lambda _: None,
    ) -> Answer:
        """`names` is what a pattern is matched against; one that fits is enough."""
        delays, failure = self._struck(method, names)
        for delay in delays:
            self._sleep(delay.seconds)
        if failure is None:
            return act()
        if failure.kind == "after":
            act()
        struck_by(failure)
        raise failure.error or self._default_error(failure, names)

    def _default_error(self, fault: Fault, names: Sequence[str]) -> Exception:
        return StoreUnavailable(f"{fault.method} {', '.join(names[:3])}: injected, {fault.kind}")

    def _struck(self, method: Method, names: Sequence[str]) -> tuple[Sequence[Fault], Fault | None]:
        delays: list[Fault] = []
        failure: Fault | None = None
        with self._lock:
            self.calls[method] += 1
            for fault in self._faults:
                if fault.method != method or not any(fnmatchcase(name, fault.match) for name in names):
                    continue
                if fault.times is not None and fault.hits >= fault.times:
                    continue
                if fault.kind == "delay":
                    delays.append(fault)
                elif failure is None:
                    failure = fault
                else:
                    continue
                fault.hits += 1
        return delays, failure


FenceMethod = Literal[
    "claim",
    "replays",
    "renew",
    "seal",
    "release",
    "reset_attempts",
    "read",
    "heads",
    "all_heads",
    "marks",
    "scan",
    "leases",
    "forget",
    "scrub",
    "stats",
    "tallies",
    "purge_expired",
    "record",
    "rows",
    "row_entries",
    "drop_rows",
    "now_ms",
    "markers",
    "versions",
    "begin_epoch",
    "load",
    "finish_epoch",
    "forget_markers",
    "lock",
    "unlock",
]


class FaultyFences(FaultyCalls[FenceMethod]):
    """Wraps a `FenceStore`: passes everything on, counts it in `calls`, and fails where it was told to.

    A pattern is matched as in the shell against the key, in hex, of anything in the batch (its first two digits are
    the shard), or the name of a lock. Calls that name nothing are matched by `*` only.
    """

    def __init__(self, inner: FenceStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(sleep)
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def tenant(self) -> str:
        return self.inner.tenant

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        return self._call("claim", _keys(claims), lambda: self.inner.claim(claims))

    def replays(self, queries: Sequence[HeadQuery]) -> Replays:
        # Settled here: what fails "after" has written its rows.
        return self._call("replays", _keys(queries), lambda: Replays(self.inner.replays(queries).settled()))

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._call("renew", _keys(leases), lambda: self.inner.renew(leases))

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        return self._call("seal", _keys(seals), lambda: self.inner.seal(seals))

    def release(
        self,
        leases: Sequence[LeaseRef],
        error: str = "",
        *,
        expire: bool = False,
        refund: bool = False,
        withdraw: bool = False,
    ) -> list[bool]:
        return self._call(
            "release",
            _keys(leases),
            lambda: self.inner.release(leases, error, expire=expire, refund=refund, withdraw=withdraw),
        )

    def reset_attempts(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._call("reset_attempts", _keys(leases), lambda: self.inner.reset_attempts(leases))

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]:
        return self._call("read", _keys(lookups), lambda: self.inner.read(lookups))

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        return self._call("heads", [f"{shard:02x}"], lambda: self.inner.heads(shard))

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        return self._call("all_heads", [""], self.inner.all_heads)

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        return self._call("marks", ["" if shard is None else f"{shard:02x}"], lambda: self.inner.marks(shard))

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        return self._call("scan", ["" if shard is None else f"{shard:02x}"], lambda: self.inner.scan(shard))

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        return self._call("leases", ["" if shard is None else f"{shard:02x}"], lambda: self.inner.leases(shard))

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        self._call(
            "forget", [key.hex() for key in keys] or [""], lambda: self.inner.forget(keys, below=below, pending=pending)
        )

    def scrub(self) -> None:
        self._call("scrub", [""], self.inner.scrub)

    def stats(self) -> Stats:
        return self._call("stats", [""], self.inner.stats)

    def tallies(self, since_ms: int = 0) -> Tallies:
        return self._call("tallies", [""], lambda: self.inner.tallies(since_ms))

    def purge_expired(self, limit: int = 1000) -> int:
        return self._call("purge_expired", [""], lambda: self.inner.purge_expired(limit))

    def record(self, rows: Sequence[Row]) -> None:
        self._call("record", _keys(rows), lambda: self.inner.record(rows))

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        return self._call("rows", [""], lambda: self.inner.rows(since_ms, shard))

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        return self._call("row_entries", [""], lambda: self.inner.row_entries(after, limit))

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        return self._call("drop_rows", [""], lambda: self.inner.drop_rows(entries))

    def now_ms(self) -> int:
        return self._call("now_ms", [""], self.inner.now_ms)

    def markers(self) -> list[Marker | None]:
        return self._call("markers", [""], self.inner.markers)

    def versions(self) -> list[tuple[int, int] | None]:
        return self._call("versions", [""], self.inner.versions)

    def begin_epoch(self, epoch: int) -> bool:
        return self._call("begin_epoch", [""], lambda: self.inner.begin_epoch(epoch))

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        names = [
            (bytes((item.shard,)) + digest_in(item.head) if isinstance(item, LoadedSource) else item.key).hex()
            for item in items
        ]
        return self._call("load", names or [""], lambda: self.inner.load(epoch, items))

    def finish_epoch(self, epoch: int) -> bool:
        return self._call("finish_epoch", [""], lambda: self.inner.finish_epoch(epoch))

    def forget_markers(self, below: int) -> None:
        self._call("forget_markers", [""], lambda: self.inner.forget_markers(below))

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        return self._call("lock", [name], lambda: self.inner.lock(name, token, ttl_ms))

    def unlock(self, name: str, token: str) -> None:
        self._call("unlock", [name], lambda: self.inner.unlock(name, token))

    def close(self) -> None:
        self.inner.close()


def _keys(items: Iterable[HeadQuery | Claim | Seal | LeaseRef | Lookup | Row]) -> list[str]:
    return [item.key.hex() for item in items] or [""]
