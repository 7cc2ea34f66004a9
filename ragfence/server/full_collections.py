"""Keeps full garbage collections short: one of them stops every request, the event loop's included.

A server with its libraries, caches and connections holds some hundred thousand objects. A collection that visits all of
them takes 100 to 200 ms. What survives a full collection that took long is frozen: later ones do not visit it. It is
still freed with its last reference. Only cycles among frozen objects would stay, so everything is thawed from time to
time, and visited once more.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LONG_S: Final = 0.01
THAW_EVERY_S: Final = 3600.0


@contextmanager
def short_full_collections() -> Iterator[None]:
    """For as long as the running event loop serves."""
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.freeze()
    began = thawed = time.monotonic()

    def after(phase: str, info: dict[str, Any]) -> None:
        nonlocal began
        if info["generation"] < 2:
            return
        if phase == "start":
            began = time.monotonic()
        elif time.monotonic() - began > LONG_S:
            loop.call_soon_threadsafe(freeze)

    def freeze() -> None:
        nonlocal thawed
        if time.monotonic() - thawed > THAW_EVERY_S:
            thawed = time.monotonic()
            gc.unfreeze()
        else:
            gc.freeze()

    gc.callbacks.append(after)
    try:
        yield
    finally:
        gc.callbacks.remove(after)
        gc.unfreeze()
