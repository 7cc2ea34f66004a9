"""Rows become a story: every kind of row has its word, and the order is that of what happened."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ragfence import Fence, Operation
from ragfence.audit.timeline import ANSWERS, EventType, Timeline, build_timelines, event_type
from ragfence.core.decision_rows import Row
from ragfence.core.decisions import QUARANTINED
from ragfence.core.layout import (
    CONFLICT_POSITION,
    END_POSITION,
    FENCED_OUT,
    FINGERPRINT_BYTES,
    HEALED,
    RELEASE_POSITION,
    SEAL_POSITION,
    TAKEOVER,
    TOKEN_BYTES,
    RowKind,
)
from ragfence.core.operations import FenceNumber as FenceNumber
from ragfence.core.receipts import default_effect_id
from ragfence.errors import Conflict, FencedOut, InFlight, Quarantined, Stale, TerminalError
from tests.engine.worlds import World, abandon, elsewhere
from tests.engine.worlds import world as make_world

KEY, OTHER = b"\x07" + b"k" * 32, b"\x07" + b"o" * 32
A, B, C = b"a" * TOKEN_BYTES, b"b" * TOKEN_BYTES, b"c" * TOKEN_BYTES


def row(ts_ms: int, token: bytes = A, kind: RowKind = RowKind.NEW, *, fence: int = 1, **more: Any) -> Row:
    context = {"kind": "t", "source_id": "s", "revision": "r", "owner": "w", "run_id": "x", **more.pop("context", {})}
    values = {"position": 0, "key": KEY, "fingerprint": bytes(FINGERPRINT_BYTES), "attempt": 1, "winner": token, **more}
    return Row(
        token=token,
        ts_ms=ts_ms,
        kind=kind,
        fence=FenceNumber(1, fence),
        context=json.dumps(context, separators=(",", ":")).encode(),
        **values,
    )


def told(*rows: Row, every: bool = False) -> list[str]:
    (story,) = build_timelines(rows, every=every)
    return [event.what.value for event in story.events]


@pytest.mark.parametrize(
    ("one", "what"),
    [
        (row(1), EventType.CLAIMED),
        (row(1, attempt=2), EventType.CLAIMED),
        (row(1, flags=TAKEOVER), EventType.TAKEN_OVER),
        (row(1, position=RELEASE_POSITION, error_code="ValueError"), EventType.RELEASED),
        (row(1, position=SEAL_POSITION, sealed_at_ms=1), EventType.SEALED),
        (row(1, position=SEAL_POSITION, sealed_at_ms=1, error_code="TERMINAL"), EventType.FAILED),
        (row(1, kind=RowKind.DUPLICATE, sealed_at_ms=1), EventType.REPLAYED),
        (row(1, kind=RowKind.DUPLICATE, position=SEAL_POSITION, flags=HEALED), EventType.HEALED),
        (row(1, kind=RowKind.DUPLICATE, position=SEAL_POSITION), EventType.MOVED),
        (row(1, kind=RowKind.DUPLICATE, position=SEAL_POSITION, flags=HEALED | FENCED_OUT), EventType.FENCED_OUT),
        (row(1, kind=RowKind.CONFLICT, position=CONFLICT_POSITION), EventType.CONFLICTED),
        (row(1, kind=RowKind.IN_FLIGHT), EventType.IN_FLIGHT),
        (row(1, kind=RowKind.IN_FLIGHT, error_code=QUARANTINED), EventType.QUARANTINED),
        (row(1, kind=RowKind.STALE), EventType.STALE),
        (row(1, kind=RowKind.ENDED, position=END_POSITION, error_code="release"), EventType.ENDED),
    ],
    ids=lambda value: value.value if isinstance(value, EventType) else "",
)
def test_every_kind_of_row_has_its_word(one: Row, what: EventType) -> None:
    assert event_type(one) is what


def test_an_event_tells_who_when_and_why() -> None:
    (story,) = build_timelines([row(5, attempt=3, fence=7, waited_ms=40, context={"event_id": "e", "route": "/x"})])
    (event,) = story.events
    assert (event.ts_ms, event.owner, event.run_id, event.attempt, event.fence) == (5, "w", "x", 3, "1.7")
    assert (event.waited_ms, event.event_id, event.route, event.count) == (40, "e", "/x", 1)
    assert (story.key, story.kind, story.source_id, story.revision) == (KEY.hex(), "t", "s", "r")


def test_a_seal_without_an_effect_id_has_the_one_of_its_key() -> None:
    (story,) = build_timelines([row(1, position=SEAL_POSITION, sealed_at_ms=1, expires_ms=9)])
    assert story.events[0].effect_id == default_effect_id(KEY)
    assert story.events[0].expires_ms == 9


LIFE = [
    row(5, A),
    row(5, C, RowKind.IN_FLIGHT),
    row(5, A, position=SEAL_POSITION, sealed_at_ms=5),
    row(5, B, RowKind.DUPLICATE, sealed_at_ms=5),
    row(5, b"e" * TOKEN_BYTES, RowKind.ENDED, position=END_POSITION),
    row(5, b"f" * TOKEN_BYTES, fence=2),
    row(5, b"f" * TOKEN_BYTES, fence=2, position=RELEASE_POSITION, error_code="ValueError"),
    row(5, b"g" * TOKEN_BYTES, RowKind.IN_FLIGHT, fence=2, error_code=QUARANTINED),
]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_one_millisecond_are_told_in_the_order_in_which_they_can_have_happened(seed: int) -> None:
    rows = [*LIFE, *LIFE]
    random.Random(seed).shuffle(rows)
    assert told(*rows) == ["claimed", "in_flight", "sealed", "replayed", "ended", "claimed", "released", "quarantined"]


def test_answers_that_repeat_each_other_are_told_once_with_their_count() -> None:
    replays = [
        row(
            10 + n, bytes([n]) * TOKEN_BYTES, RowKind.DUPLICATE, sealed_at_ms=2, waited_ms=n, context={"owner": f"w{n}"}
        )
        for n in range(14)
    ]
    rows = [row(1), row(2, position=SEAL_POSITION, sealed_at_ms=2), *replays]
    (story,) = build_timelines(rows)
    *_, last = story.events
    assert (last.what, last.count, last.ts_ms, last.last_ms, last.owner, last.waited_ms) == (
        *(EventType.REPLAYED, 14, 10, 23),
        *("", 13),
    )
    assert story.count(EventType.REPLAYED) == 14
    (each,) = build_timelines(rows, every=True)
    assert len(each.events) == 16
    assert {event.count for event in each.events} == {1}


def test_what_happens_between_two_answers_keeps_them_apart() -> None:
    rows = [
        row(1, A, RowKind.DUPLICATE, sealed_at_ms=1),
        row(2, b"e" * TOKEN_BYTES, RowKind.ENDED, position=END_POSITION),
        row(3, B, RowKind.DUPLICATE, sealed_at_ms=1),
    ]
    assert told(*rows) == ["replayed", "ended", "replayed"]


def test_conflicts_are_the_same_only_with_the_same_payload() -> None:
    rows = [
        row(n, bytes([n]) * TOKEN_BYTES, RowKind.CONFLICT, fingerprint=bytes([n // 3]) * FINGERPRINT_BYTES)
        for n in (1, 2, 3, 4)
    ]
    (story,) = build_timelines(rows)
    assert [(event.what, event.count) for event in story.events] == [
        (EventType.CONFLICTED, 2),
        (EventType.CONFLICTED, 2),
    ]


def test_steps_of_an_attempt_are_never_collapsed() -> None:
    rows = [row(n, bytes([n]) * TOKEN_BYTES, attempt=n, fence=n) for n in (1, 2, 3)]
    assert told(*rows) == ["claimed"] * 3
    assert not ANSWERS & {EventType.CLAIMED, EventType.SEALED, EventType.RELEASED, EventType.ENDED}


def test_each_key_has_a_story_and_the_one_that_began_first_comes_first() -> None:
    stories = build_timelines([row(9), row(1, B, key=OTHER), row(10, C)])
    assert [story.key for story in stories] == [OTHER.hex(), KEY.hex()]
    assert build_timelines([]) == []


def test_the_operation_is_named_by_the_first_row_that_knows_it() -> None:
    nameless = Row(
        token=A, position=0, ts_ms=1, kind=RowKind.NEW, key=KEY, fingerprint=bytes(FINGERPRINT_BYTES), context=b"{}"
    )
    (story,) = build_timelines([nameless, row(2, B, fence=2)])
    assert (story.kind, story.source_id) == ("t", "s")
    (unnamed,) = build_timelines([nameless])
    assert (unnamed.kind, unnamed.source_id) == ("", "")


@pytest.fixture(params=["embedded", "memory", "solo"])
def world(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


def attempt(fence: Fence, operation: Operation, payload: object = None, fail: Exception | None = None) -> None:
    with fence.claim(operation, payload=payload, wait_s=0) as op:
        if fail:
            raise fail
        if op.is_new:
            op.seal()


def test_a_real_life_is_told_as_it_was(world: World) -> None:
    """Tried, failed, abandoned, taken over, sealed, asked for again, in conflict, released by its owner's successor."""
    fence = world.open(owner="one", lease={"max_attempts": 3})
    wanted = Operation(kind="ticket", source_id="a", tenant="default")
    with pytest.raises(RuntimeError):
        attempt(fence, wanted, fail=RuntimeError("no"))
    world.clock.advance(1)
    slow = abandon(fence, wanted)
    world.clock.advance(1)
    other = world.open(owner="two", lease={"max_attempts": 3})
    with pytest.raises(InFlight):
        elsewhere(lambda: attempt(other, wanted))
    world.let_leases_run_out()
    elsewhere(lambda: attempt(other, wanted))
    world.clock.advance(1)
    with pytest.raises(FencedOut):
        slow.seal()
    world.clock.advance(1)
    for _ in range(3):
        attempt(fence, wanted)
        world.clock.advance(1)
    with pytest.raises(Conflict):
        attempt(fence, wanted, payload={"other": 1})
    story = fence.audit.explain(wanted.key.hex())
    assert [event.what.value for event in story.events] == [
        *("claimed", "released", "claimed", "in_flight", "taken_over", "sealed", "fenced_out", "replayed"),
        "conflicted",
    ]
    first, given_back, second, asked, taken, sealed, late, replayed, refused = story.events
    assert (first.owner, first.attempt, given_back.error_code) == ("one", 1, "RuntimeError")
    assert (second.attempt, asked.owner, taken.owner, taken.attempt) == (2, "two", "two", 3)
    assert (sealed.token, late.owner, replayed.count) == (taken.token, "one", 3)
    assert refused.payload_hash != first.payload_hash
    assert len(fence.audit.explain(wanted.key.hex(), every=True).events) == 11


def test_a_failure_its_release_and_a_new_life(world: World) -> None:
    fence = world.open()
    wanted = Operation(kind="ticket", source_id="a", tenant="default")
    with pytest.raises(TerminalError):
        attempt(fence, wanted, fail=TerminalError("final"))
    world.clock.advance(1)
    fence.release(wanted)
    world.clock.advance(1)
    attempt(fence, wanted)
    events = fence.audit.explain(wanted.key.hex()).events
    assert [event.what.value for event in events] == ["claimed", "failed", "ended", "claimed", "sealed"]


def test_quarantine_and_staleness(world: World) -> None:
    fence = world.open(lease={"max_attempts": 1})
    stuck = Operation(kind="ticket", source_id="stuck", tenant="default")
    with pytest.raises(RuntimeError):
        attempt(fence, stuck, fail=RuntimeError("no"))
    for _ in range(2):
        world.clock.advance(1)
        with pytest.raises(Quarantined):
            attempt(fence, stuck)
    events = fence.audit.explain(stuck.key.hex()).events
    assert [(event.what.value, event.count) for event in events] == [
        ("claimed", 1),
        ("released", 1),
        ("quarantined", 2),
    ]
    attempt(fence, Operation(kind="t", source_id="o", sequence=3, revision="A"))
    world.clock.advance(1)
    old = Operation(kind="t", source_id="o", sequence=2, tenant="default")
    with pytest.raises(Stale):
        attempt(fence, old)
    assert [event.what.value for event in fence.audit.explain(old.key.hex()).events] == ["stale"]
    world.clock.advance(1)
    attempt(fence, Operation(kind="t", source_id="o", sequence=5, revision="A"))  # the same revision, further up
    moved = fence.audit.explain(Operation(kind="t", source_id="o", revision="A", tenant="default").key.hex())
    assert [event.what.value for event in moved.events] == ["claimed", "sealed", "claimed", "moved"]
    assert moved.sequence == "3"


def test_a_key_nobody_ever_named_has_no_events(world: World) -> None:
    assert world.open().audit.explain(KEY.hex()) == Timeline(KEY.hex())
