"""Where a process that ingests can be killed or frozen: at the points of the protocol, and inside two store calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ragfence.documents.head_moves import AFTER_SNIPPETS, DOCUMENT_POINTS
from ragfence.engine import crash_points
from ragfence.testing import at_point
from tests.documents.attack.work import BEFORE_EPOCH_CHECK, MID_SEAL

STRIKES = (
    crash_points.AFTER_CLAIM,
    AFTER_SNIPPETS,
    crash_points.AFTER_COMMIT,
    BEFORE_EPOCH_CHECK,
    crash_points.BEFORE_SEAL,
    MID_SEAL,
    crash_points.AFTER_SEAL,
)
"""In the order in which a batch comes by them."""

assert set(DOCUMENT_POINTS) <= set(STRIKES)


class Passing:
    """Passes every call on to a store."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CutSeals(Passing):
    """Seals the first half of a batch, shard by shard, and then, told so once by `arm`, acts before the second."""

    _act: Callable[[], None] | None = None

    def arm(self, act: Callable[[], None] | None) -> None:
        self._act = act

    def seal(self, seals: Sequence[Any]) -> list[Any]:
        act, self._act = self._act, None
        if act is None:
            return self.inner.seal(seals)  # type: ignore[no-any-return]
        order = sorted(range(len(seals)), key=lambda at: (seals[at].key[0], at))
        half = len(order) // 2
        first = self.inner.seal([seals[at] for at in order[:half]]) if half else []
        act()
        rest = self.inner.seal([seals[at] for at in order[half:]])
        outcomes = dict(zip(order, [*first, *rest], strict=True))
        return [outcomes[at] for at in range(len(seals))]


class WatchedObjects(Passing):
    """Acts before the look for a newer epoch that follows a commit, told so once by `arm`."""

    _act: Callable[[], None] | None = None
    _committed = False

    def arm(self, act: Callable[[], None] | None) -> None:
        self._act, self._committed = act, False

    def put_new(self, name: str, data: bytes) -> Any:
        put = self.inner.put_new(name, data)
        self._committed |= "/segments/" in name
        return put

    def list(self, prefix: str, **options: Any) -> Any:
        if self._act is not None and self._committed and prefix.endswith("/epochs/"):
            act, self._act = self._act, None
            act()
        return self.inner.list(prefix, **options)


@contextlib.contextmanager
def struck(point: str, act: Callable[[], None], fences: CutSeals, objects: WatchedObjects) -> Iterator[None]:
    """Acts the first time that this process comes by the point."""
    with contextlib.ExitStack() as stack:
        if point == MID_SEAL:
            fences.arm(act)
            stack.callback(fences.arm, None)
        elif point == BEFORE_EPOCH_CHECK:
            objects.arm(act)
            stack.callback(objects.arm, None)
        else:
            stack.enter_context(at_point(point, act))
        yield
