"""Stop, kill or delay a process at a named point of the protocol (see `ragfence.engine.crash_points`)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from ragfence.engine import crash_points
from ragfence.engine.crash_points import HYDRATION_POINTS, OPERATION_POINTS

__all__ = ["HYDRATION_POINTS", "OPERATION_POINTS", "at_point", "freeze_at", "kill_at"]


def every_point() -> tuple[str, ...]:
    """Those of operations, hydration, documents and their sinks, rewriting, builds, aliases, gc, purging, drains."""
    from ragfence.audit.drain import DRAIN_POINTS
    from ragfence.audit.tombstones import TOMBSTONE_POINTS
    from ragfence.documents.head_moves import DOCUMENT_POINTS
    from ragfence.documents.rewrite import REWRITING_POINTS
    from ragfence.documents.sinks.sink import SINK_POINTS
    from ragfence.indexes.aliases import ALIAS_POINTS
    from ragfence.indexes.build import BUILD_POINTS
    from ragfence.indexes.gc import GC_POINTS
    from ragfence.indexes.row_purge import ROW_PURGE_POINTS
    from ragfence.notify.notifier import NOTIFY_POINTS

    documents = (*DOCUMENT_POINTS, *SINK_POINTS, *REWRITING_POINTS)
    indexes = (*BUILD_POINTS, *ALIAS_POINTS, *GC_POINTS, *ROW_PURGE_POINTS)
    audit = (*DRAIN_POINTS, *TOMBSTONE_POINTS, *NOTIFY_POINTS)
    return tuple(dict.fromkeys((*OPERATION_POINTS, *HYDRATION_POINTS, *documents, *indexes, *audit)))


@contextlib.contextmanager
def at_point(point: str, action: Callable[[], None], *, times: int = 1) -> Iterator[None]:
    """Runs `action` the first `times` times this process reaches the point.

    >>> with at_point("after_commit", lambda: os.kill(os.getpid(), signal.SIGKILL)):  # doctest: +SKIP
    ...     create_ticket(request)
    """
    if point not in (known := every_point()):
        raise ValueError(f"{point!r} is not a crash point; there are {', '.join(known)}")
    left = times
    before = crash_points.visitor

    def visit(reached: str) -> None:
        nonlocal left
        if before is not None:
            before(reached)
        if reached == point and left > 0:
            left -= 1
            action()

    crash_points.visitor = visit
    try:
        yield
    finally:
        crash_points.visitor = before


def kill_at(point: str, *, times: int = 1) -> contextlib.AbstractContextManager[None]:
    """SIGKILL to this very process: nothing is released, flushed or said goodbye to."""
    return at_point(point, lambda: os.kill(os.getpid(), signal.SIGKILL), times=times)


def freeze_at(point: str, *, times: int = 1) -> contextlib.AbstractContextManager[None]:
    """SIGSTOP: whoever sent SIGCONT later wakes a process whose lease may long be somebody else's."""
    # To this very thread, which stops at once, and all others with it: one that ran on might stop inside a transaction.
    return at_point(point, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP), times=times)
