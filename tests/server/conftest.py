"""A fence of its own for every test, and requests to applications without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Fence, Policy

OpenFence = Callable[..., Fence]


@pytest.fixture
def open_fence(tmp_path: Path) -> Iterator[OpenFence]:
    """`open_fence(http={...})`: a fence under this policy; the same place every time."""
    opened: list[Fence] = []

    def opening(*, tenant: str = "acme", **policy: Any) -> Fence:
        # Short waits, and diffs: what these tests are about.
        rules = {"on_conflict": {"include_diff": True}} | policy
        opened.append(ragfence.open(tmp_path / "fence", tenant=tenant, policy=Policy.from_mapping(rules)))
        return opened[-1]

    yield opening
    for fence in opened:
        fence.close()


@pytest.fixture
def fence(open_fence: OpenFence) -> Fence:
    return open_fence()
