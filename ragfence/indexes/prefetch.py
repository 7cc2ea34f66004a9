"""Threads beside the one that hands on tables: what comes next is made, what went by is worked on.

Whoever reads or makes tables (a backend, an embedder, the object store) is mostly code that needs no interpreter, so
nobody has to wait for it. Few tables are under way at a time: an index may be larger than memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_END: Any = object()
MOST = 2


class Prefetch(Generic[_T]):
    """An iterator whose next values are made in a thread of its own, while the last one is being used.

    Begins at once. What the source raises is raised here, in its turn.

    >>> with Ahead(iter("abc")) as letters:
    ...     list(letters)
    ['a', 'b', 'c']
    """

    def __init__(self, source: Iterator[_T], most: int = MOST) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ragfence-ahead")
        self._made: deque[Future[_T]] = deque(self._pool.submit(next, source, _END) for _ in range(most))

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        value = self._made.popleft().result() if self._made else _END
        if value is _END:
            self._made.clear()
            raise StopIteration
        self._made.append(self._pool.submit(next, self._source, _END))
        return value

    def __enter__(self) -> Prefetch[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, broken: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the value that is being made, and ends the source: what it holds is given back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        close = getattr(self._source, "close", None)
        if close is not None:
            # What is dropped half-way and complains of it: whoever leaves has an error of its own, or needs no more.
            with contextlib.suppress(Exception):
                close()


class SideThread(Generic[_T]):
    """Something that is done with each value, one after the other, in a thread of its own."""

    def __init__(self, act: Callable[[_T], object], most: int = MOST) -> None:
        self._act = act
        self._most = most
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ragfence-aside")
        self._under_way: deque[Future[object]] = deque()

    def begin(self, value: _T) -> None:
        """Waits while there are too many; raises what it raised with an earlier one."""
        self._under_way.append(self._pool.submit(self._act, value))
        self._wait_until(self._most)

    def finish(self) -> None:
        """Waits for all of them; raises what it raised with any."""
        self._wait_until(0)

    def _wait_until(self, left: int) -> None:
        while len(self._under_way) > left:
            self._under_way.popleft().result()

    def close(self) -> None:
        """What has not begun is left undone."""
        self._pool.shutdown(wait=True, cancel_futures=True)
