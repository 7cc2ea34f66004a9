"""Object stores for tests: one in memory, and one that fails on command.

objects = FaultyObjects(MemoryObjects())
objects.on("put_new", match="acme/sealed/*").fail_after(times=1)    # stored, but the reply is lost
late = objects.on("put_new", match="*/epochs/*").hold()             # the caller gives up ...
late.land()                                                         # ... and now the write arrives
objects.calls["put_new"]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from ragfence.errors import CommitUncertain
from ragfence.stores.objects import Entry, ObjectStore, Put, check_listing, check_name
from ragfence.testing.faults import Error, Fault, FaultyCalls, Orders

__all__ = ["Fault", "FaultyObjects", "HeldPut", "MemoryObjects", "Method", "ObjectOrders", "Orders"]

Method = Literal["get", "put_new", "list", "delete"]


class MemoryObjects:
    """An `ObjectStore` in a dictionary; gone with the process. `clock_ms` dates the objects."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._clock_ms = clock_ms

    @property
    def url(self) -> str:
        return f"memory://{id(self):x}"

    def get(self, name: str) -> bytes | None:
        check_name(name)
        with self._lock:
            found = self._objects.get(name)
        return None if found is None else found[0]

    def put_new(self, name: str, data: bytes) -> Put:
        check_name(name)
        with self._lock:
            if name in self._objects:
                return Put(won=False, existing=self._objects[name][0])
            self._objects[name] = (bytes(data), self._clock_ms())
            return Put(won=True)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[Entry]:
        check_listing(prefix, limit)
        with self._lock:
            found = [
                Entry(name, len(data), modified_ms)
                for name, (data, modified_ms) in self._objects.items()
                if name.startswith(prefix) and name > start_after
            ]
        return islice(sorted(found, key=lambda entry: entry.name), limit)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        with self._lock:
            for name in names:
                self._objects.pop(name, None)

    def close(self) -> None:
        """Nothing is kept open."""


class HeldPut:
    """A `put_new` on its way: its caller was told CommitUncertain, the store has not seen it yet."""

    def __init__(self) -> None:
        self._sent: tuple[ObjectStore, str, bytes] | None = None

    @property
    def caught(self) -> bool:
        """Whether a put has come by and is being held."""
        return self._sent is not None

    @property
    def name(self) -> str:
        if self._sent is None:
            raise LookupError("no put_new was held back yet")
        return self._sent[1]

    def land(self) -> Put:
        """Lets the write reach the store now, and says what came of it. Landing twice is a replayed packet."""
        if self._sent is None:
            raise LookupError("no put_new was held back yet")
        inner, name, data = self._sent
        return inner.put_new(name, data)

    def _catch(self, inner: ObjectStore, name: str, data: bytes) -> None:
        self._sent = (inner, name, data)


@dataclass(slots=True, eq=False)
class ObjectFault(Fault):
    held: HeldPut | None = None


class ObjectOrders(Orders):
    """What `FaultyObjects.on` returns."""

    def hold(self, error: Error | None = None) -> HeldPut:
        """The next put fails at once, but its write is still on its way until `land()` is called."""
        if self._method != "put_new":
            raise ValueError(f"only a put_new can be held back, not {self._method}")
        held = HeldPut()
        self._give(ObjectFault(self._method, self._match, "hold", 1, error, held=held))
        return held


class FaultyObjects(FaultyCalls[Method]):
    """Wraps an `ObjectStore`: passes everything on, counts it in `calls`, and fails where it was told to.

    A pattern is matched as in the shell (`*` also crosses `/`) against the name, the prefix of a `list`, or any
    name of a `delete`. Of several orders that fit a call all delays count, then the first failure given. What is
    held back can still land after `heal()`.
    """

    def __init__(self, inner: ObjectStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(sleep)
        self.inner = inner

    def on(self, method: Method, match: str = "*") -> ObjectOrders:
        return ObjectOrders(self._give, method, match)

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, name: str) -> bytes | None:
        return self._call("get", [name], lambda: self.inner.get(name))

    def put_new(self, name: str, data: bytes) -> Put:
        def caught(fault: Fault) -> None:
            if isinstance(fault, ObjectFault) and fault.held is not None:
                fault.held._catch(self.inner, name, data)

        return self._call("put_new", [name], lambda: self.inner.put_new(name, data), caught)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[Entry]:
        return self._call("list", [prefix], lambda: self.inner.list(prefix, start_after=start_after, limit=limit))

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete", names, lambda: self.inner.delete(names))

    def close(self) -> None:
        self.inner.close()

    def _default_error(self, fault: Fault, names: Sequence[str]) -> Exception:
        if fault.method == "put_new" and fault.kind != "before":
            return CommitUncertain(f"put_new {names[0]}: injected, {fault.kind}")
        return super()._default_error(fault, names)
