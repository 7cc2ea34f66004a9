"""Places with an object store, as for documents."""

from __future__ import annotations

from tests.documents.conftest import here, memory, near

__all__ = ["here", "memory", "near"]
