"""The worlds of the engine's tests serve the package, too."""

from __future__ import annotations

from tests.engine.conftest import backed, embedded, job, memory, old, old_memory, solo, tickets, world

__all__ = ["backed", "embedded", "job", "memory", "old", "old_memory", "solo", "tickets", "world"]
