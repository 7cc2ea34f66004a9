"""Signals that end a worker after what it has in hand."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_at_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` at SIGTERM or SIGINT while the block runs, in the main thread; no other thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, lambda *_: stop()) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
