"""For tests of your own effects and stores: stores in memory, stores that fail on command, crash points, contracts.

    from ragfence.testing import FaultyFences, MemoryFences, MemoryObjects

    def test_a_lost_reply_creates_no_second_ticket():
        fences = FaultyFences(MemoryFences())
        with ragfence.open(fences, objects=MemoryObjects()) as fence:
            create = fence.once(kind="ticket", key=lambda request: request["id"])(create_ticket)
            fences.on("seal").fail_after()  # sealed, but the reply is lost
            receipt = create({"id": "r1"})
            assert create({"id": "r1"}) == receipt
        assert len(tickets) == 1

What there is:

    VirtualClock                    time that passes only when told to
    MemoryFences, MemoryObjects     stores that are gone with the process
    FaultyFences, FaultyObjects     any store, failing before or after it acted, late, and counting its calls
    at_point, kill_at, freeze_at    stop this process at one of OPERATION_POINTS or HYDRATION_POINTS
    FenceStoreContract              what a fence store of your own must pass, given a FencesUnderTest
    ObjectStoreContract             what an object store of your own must pass
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.testing.clock import VirtualClock as VirtualClock
    from ragfence.testing.contracts.fences import FenceStoreContract as FenceStoreContract
    from ragfence.testing.contracts.fences import FencesUnderTest as FencesUnderTest
    from ragfence.testing.contracts.objects import ObjectStoreContract as ObjectStoreContract
    from ragfence.testing.crash_points import HYDRATION_POINTS as HYDRATION_POINTS
    from ragfence.testing.crash_points import OPERATION_POINTS as OPERATION_POINTS
    from ragfence.testing.crash_points import at_point as at_point
    from ragfence.testing.crash_points import freeze_at as freeze_at
    from ragfence.testing.crash_points import kill_at as kill_at
    from ragfence.testing.faults import FaultyFences as FaultyFences
    from ragfence.testing.memory import FaultyObjects as FaultyObjects
    from ragfence.testing.memory import MemoryFences as MemoryFences
    from ragfence.testing.memory import MemoryObjects as MemoryObjects

# The contracts need pytest, which a user of the rest may not have: everything is loaded when it is asked for.
_WHERE = {
    "FaultyFences": "faults",
    "FaultyObjects": "memory",
    "FenceStoreContract": "contracts.fences",
    "FencesUnderTest": "contracts.fences",
    "HYDRATION_POINTS": "crash_points",
    "MemoryFences": "memory",
    "MemoryObjects": "memory",
    "OPERATION_POINTS": "crash_points",
    "ObjectStoreContract": "contracts.objects",
    "VirtualClock": "clock",
    "at_point": "crash_points",
    "freeze_at": "crash_points",
    "kill_at": "crash_points",
}

__all__ = [
    "HYDRATION_POINTS",
    "OPERATION_POINTS",
    "FaultyFences",
    "FaultyObjects",
    "FenceStoreContract",
    "FencesUnderTest",
    "MemoryFences",
    "MemoryObjects",
    "ObjectStoreContract",
    "VirtualClock",
    "at_point",
    "freeze_at",
    "kill_at",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ragfence.testing' has no attribute {name!r}")
    value = getattr(import_module(f"ragfence.testing.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
