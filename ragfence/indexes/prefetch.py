"""Threads alongside the one that passes tables on: they make the next tables and work on earlier ones.

Reading and making tables (backends, embedders, the object store) mostly runs without the interpreter lock, so it can
overlap. Only a few tables are in memory at a time, because an index may be larger than memory.
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
    """An iterator whose next values are made in a background thread while the last one is used.

    Starts at once. What the source raises is raised here, in its turn.

    >>> with Prefetch(iter("abc")) as letters:
    ...     list(letters)
    ['a', 'b', 'c']
    """

    def __init__(self, source: Iterator[_T], most: int = MOST) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ragfence-prefetch")
        self._futures: deque[Future[_T]] = deque(self._pool.submit(next, source, _END) for _ in range(most))

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        value = self._futures.popleft().result() if self._futures else _END
        if value is _END:
            self._futures.clear()
            raise StopIteration
        self._futures.append(self._pool.submit(next, self._source, _END))
        return value

    def __enter__(self) -> Prefetch[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, broken: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the value that is being made, and closes the source, which releases what it holds."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        close = getattr(self._source, "close", None)
        if close is not None:
            # An error of closing it half-way is ignored: the block has its own error, or needs no more values.
            with contextlib.suppress(Exception):
                close()


class SideThread(Generic[_T]):
    """Calls a function with values, one after the other, in a background thread."""

    def __init__(self, act: Callable[[_T], object], most: int = MOST) -> None:
        self._act = act
        self._most = most
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ragfence-side")
        self._queue: deque[Future[object]] = deque()

    def begin(self, value: _T) -> None:
        """Queues a value. Waits while too many are queued; raises what the function raised for an earlier one."""
        self._queue.append(self._pool.submit(self._act, value))
        self._wait_until(self._most)

    def finish(self) -> None:
        """Waits for all values; raises what the function raised for any of them."""
        self._wait_until(0)

    def _wait_until(self, left: int) -> None:
        while len(self._queue) > left:
            self._queue.popleft().result()

    def close(self) -> None:
        """Stops; values that are still queued are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
