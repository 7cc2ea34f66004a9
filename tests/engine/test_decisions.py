"""Decision rows as people read them, and the auditor: it must find every broken promise and no kept one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from ragfence import Decision, Fence, Operation
from ragfence.audit import AuditReport, check
from ragfence.core.decision_rows import Row
from ragfence.core.layout import (
    END_POSITION,
    FENCED_OUT,
    HEALED,
    NO_TOKEN,
    RELEASE_POSITION,
    SEAL_POSITION,
    TAKEOVER,
    TOKEN_BYTES,
    RowKind,
)
from ragfence.core.operations import FenceNumber
from ragfence.core.policy import ROW_FIELDS
from ragfence.errors import Conflict, FencedOut, TerminalError, ValidationError
from ragfence.testing.clock import START_MS
from tests.engine.worlds import World, Wrapped, abandon, elsewhere

COLUMNS = """
    row_id ts tenant kind decision flags idempotency_key payload_hash effect_id source_type source_id revision
    index_hash event_id correlation_id attempt fence owner run_id route winner first_seen sealed_at waited_ms
    error_code diff_size saved
""".split()  # noqa: SIM905  # as the design has it
HOUR_MS = 3_600_000
START = datetime.fromtimestamp(START_MS / 1000, UTC)


def operation(source_id: str = "a", **more: Any) -> Operation:
    return Operation(kind="ticket", source_id=source_id, tenant="default", **more)


def perform(fence: Fence, wanted: Operation, payload: object = None) -> None:
    with fence.claim(wanted, payload=payload) as op:
        if op.is_new:
            op.seal()


def test_a_decision_has_the_columns_of_the_design(world: World) -> None:
    table = world.open().audit.decisions()
    assert isinstance(table, pa.Table)
    assert [name for name in table.column_names if name in COLUMNS] == COLUMNS
    assert set(table.column_names) == ROW_FIELDS, "the policy's include_fields must know them all"
    for name in ("ts", "first_seen", "sealed_at", "expires_at"):
        assert table.schema.field(name).type == pa.timestamp("ms", tz="UTC")


def test_a_decision_tells_what_was_decided_for_whom_and_why(world: World) -> None:
    fence = world.open(owner="worker-7")
    wanted = operation(revision="2", source_type="crm", action="close", index_hash="ix")
    with fence.claim(wanted, payload={"a": 1}, event_id="e", correlation_id="c", route="/x") as op:
        world.clock.advance(5)
        sealed = op.seal(effect_id="eff-1")
    world.clock.advance(5)
    perform(fence, wanted, {"a": 1})
    claimed, ended, replayed = fence.audit.decisions().to_pylist()
    for row in (claimed, ended, replayed):
        assert (row["tenant"], row["kind"], row["source_id"], row["revision"]) == ("default", "ticket", "a", "2")
        assert (row["source_type"], row["action"], row["index_hash"]) == ("crm", "close", "ix")
        assert row["idempotency_key"] == sealed.key
        assert (row["attempt"], row["fence"], row["first_seen"]) == (1, sealed.fence, START)
        assert row["winner"] == claimed["winner"]
    assert [row["decision"] for row in (claimed, ended, replayed)] == ["new", "new", "duplicate"]
    assert [row["sealed_at"] for row in (claimed, ended, replayed)] == [None, *[START + timedelta(milliseconds=5)] * 2]
    assert [row["effect_id"] for row in (claimed, ended, replayed)] == [None, "eff-1", "eff-1"]
    assert (ended["event_id"], ended["correlation_id"], ended["route"]) == ("e", "c", "/x")
    assert (ended["owner"], replayed["owner"]) == ("worker-7", "worker-7")
    assert len({row["payload_hash"] for row in (claimed, ended, replayed)}) == 1
    assert ended["expires_at"] > ended["sealed_at"]


def test_an_effect_without_a_name_has_its_default_in_the_rows_too(world: World) -> None:
    fence = world.open()
    with fence.claim(operation()) as op:
        op.seal()
    assert fence.audit.decisions().to_pylist()[-1]["effect_id"] == op.receipt.effect_id


@pytest.fixture
def two_hours(memory: World) -> Fence:
    """One decision at the start, one an hour later; it is now an hour after that."""
    fence = memory.open()
    perform(fence, operation("first"))
    memory.clock.advance(HOUR_MS)
    perform(fence, operation("second"))
    memory.clock.advance(HOUR_MS)
    return fence


def sources(table: pa.Table) -> set[str]:
    return set(table.column("source_id").to_pylist())


LATER = START + timedelta(minutes=30)


@pytest.mark.parametrize(
    "since",
    [
        *("90m", "90 m", "5400s", "5400000ms", "1h", timedelta(minutes=90)),
        *(LATER, LATER.replace(tzinfo=None), LATER.isoformat(), LATER.replace(tzinfo=None).isoformat()),
        LATER.astimezone(timezone(timedelta(hours=5))).isoformat(),
    ],
)
def test_decisions_since_a_moment_in_any_form(two_hours: Fence, since: Any) -> None:
    assert sources(two_hours.audit.decisions(since=since)) == {"second"}
    assert sources(two_hours.audit.decisions(until=since)) == {"first"}
    assert sources(two_hours.audit.decisions(since="1d")) == {"first", "second"}


def test_since_includes_its_moment_and_until_does_not(two_hours: Fence) -> None:
    moment = START + timedelta(hours=1)
    assert sources(two_hours.audit.decisions(since=moment)) == {"second"}
    assert sources(two_hours.audit.decisions(until=moment)) == {"first"}
    assert sources(two_hours.audit.decisions(since=START, until=moment)) == {"first"}
    assert sources(two_hours.audit.decisions(since=moment, until=moment)) == set()


@pytest.mark.parametrize("moment", ["yesterday", "24x", "", "h", "-1h", "1h\n", 5, 1.5, date(2026, 1, 1), object()])
@pytest.mark.parametrize("name", ["since", "until"])
def test_what_is_no_moment_is_refused(memory: World, name: str, moment: Any) -> None:
    with pytest.raises(ValidationError, match="is not a point in time") as refused:
        memory.open().audit.decisions(**{name: moment})
    assert '"24h"' in refused.value.hint


def test_decisions_are_filtered_by_kind_decision_and_source(world: World) -> None:
    fence = world.open()
    for source in ("a", "a", "b"):
        perform(fence, operation(source))
    perform(fence, Operation(kind="other", source_id="a"))
    decisions = fence.audit.decisions
    assert decisions().num_rows == 7
    assert decisions(kind="other").num_rows == 2
    assert decisions(source_id="a").num_rows == 5
    assert decisions(decision="duplicate").num_rows == decisions(decision=Decision.DUPLICATE).num_rows == 1
    assert decisions(kind="ticket", source_id="b", decision="new").num_rows == 2
    assert decisions(kind="ticket", source_id="b", decision="duplicate").num_rows == 0


def test_a_row_that_was_written_twice_is_told_once(memory: World) -> None:
    class Repeating(Wrapped):
        def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterable[Row]:
            rows = list(self.inner.rows(since_ms))
            return [*rows, *rows]

    fence = memory.open(fences=Repeating)
    perform(fence, operation())
    assert fence.audit.decisions().num_rows == fence.audit.check().rows == 2


def test_decisions_are_told_oldest_first(memory: World) -> None:
    class Backwards(Wrapped):
        def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterable[Row]:
            return reversed(list(self.inner.rows(since_ms)))

    fence = memory.open(fences=Backwards)
    for source in ("a", "b", "c"):
        perform(fence, operation(source))
        memory.clock.advance(1)
    assert fence.audit.decisions().column("source_id").to_pylist() == ["a", "a", "b", "b", "c", "c"]


def test_everything_that_happens_to_an_honest_fence_passes_the_audit(world: World) -> None:
    fence = world.open()
    perform(fence, operation("a"))
    perform(fence, operation("a"))
    with pytest.raises(Conflict):
        perform(fence, operation("a"), payload=1)
    with fence.claim(operation("b")):
        pass
    perform(fence, operation("b"))
    with pytest.raises(TerminalError), fence.claim(operation("c")):
        raise TerminalError("x")
    fence.release(operation("c"))
    perform(fence, operation("c"))
    slow = abandon(fence, operation("d"))
    world.let_leases_run_out()
    elsewhere(lambda: perform(world.open(), operation("d")))
    with pytest.raises(FencedOut):
        slow.seal()
    for sequence in (1, 3):
        perform(fence, operation("e", sequence=sequence, revision="A"))
    report = fence.audit.check()
    assert report.ok, str(report)
    assert report.keys == 5


def test_a_key_may_live_again_after_its_time(solo: World) -> None:
    fence = solo.open()
    for _ in range(3):
        perform(fence, operation())
        perform(fence, operation())
        solo.clock.advance(48 * HOUR_MS)
    rows = fence.audit.decisions(decision="new").to_pylist()
    assert len([row for row in rows if row["sealed_at"]]) == 3
    assert fence.audit.check().ok, str(fence.audit.check())


def test_a_store_that_forgot_a_life_is_found(solo: World) -> None:
    fence = solo.open()
    perform(fence, operation())
    solo.clock.advance(1)
    solo.store.flush()
    perform(fence, operation())
    findings = fence.audit.check().findings
    assert "lost_epoch" in {finding.invariant for finding in findings}


KEY, OTHER_KEY = b"\x07" + b"k" * 32, b"\x07" + b"o" * 32
A, B = b"a" * TOKEN_BYTES, b"b" * TOKEN_BYTES


def row(
    ts_ms: int,
    token: bytes,
    kind: RowKind = RowKind.NEW,
    *,
    position: int = 0,
    fence: tuple[int, int] = (1, 1),
    source_id: str | None = "s",
    **more: Any,
) -> Row:
    context = json.dumps({"kind": "t", "source_id": source_id} if source_id else {}).encode()
    defaults = {"key": KEY, "fingerprint": bytes(16), "winner": token, "attempt": 1, "context": context}
    return Row(
        token=token, position=position, ts_ms=ts_ms, kind=kind, fence=FenceNumber(*fence), **{**defaults, **more}
    )


def sealed(ts_ms: int, token: bytes, **more: Any) -> Row:
    return row(ts_ms, token, **{"position": SEAL_POSITION, "sealed_at_ms": ts_ms, **more})


def replay(ts_ms: int, token: bytes, winner: bytes, **more: Any) -> Row:
    return row(ts_ms, token, RowKind.DUPLICATE, **{"winner": winner, "sealed_at_ms": 1, **more})


def invariants(*rows: Row) -> list[str]:
    report = check(rows)
    for finding in report.findings:
        assert finding.key in (KEY.hex(), OTHER_KEY.hex())
        assert set(finding.rows) <= {one.row_id for one in rows}
        assert len(finding.rows) == 2
        assert finding.invariant in str(report)
    return sorted({finding.invariant for finding in report.findings})


ENDED = row(5, b"e" * TOKEN_BYTES, RowKind.ENDED, position=END_POSITION)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        pytest.param([sealed(1, A), sealed(9, B, fence=(1, 2))], ["equal_receipts", "one_seal"], id="sealed twice"),
        pytest.param(
            [sealed(1, A, expires_ms=10), sealed(9, B, fence=(1, 2))],
            ["equal_receipts", "one_seal"],
            id="sealed twice before the first one's time was over",
        ),
        pytest.param(
            [sealed(1, A), sealed(9, B, fence=(2, 1))], ["equal_receipts", "lost_epoch"], id="the store forgot a life"
        ),
        pytest.param(
            [sealed(1, A), replay(2, B, A, effect_id="other")], ["equal_receipts"], id="answered with another effect"
        ),
        pytest.param([sealed(1, A), replay(2, B, B)], ["equal_receipts"], id="answered with another attempt"),
        pytest.param(
            [replay(2, A, A), replay(3, B, B)], ["equal_receipts"], id="unequal answers without the seal's row"
        ),
        pytest.param(
            [sealed(2, B, fence=(1, 2)), replay(3, A, A, position=SEAL_POSITION, flags=FENCED_OUT)],
            ["equal_receipts"],
            id="a seal that was fenced out and answered with its own outcome",
        ),
        pytest.param([row(1, A, fence=(1, 2)), row(2, B, fence=(1, 1))], ["fences_ascend"], id="descending counter"),
        pytest.param([row(1, A, fence=(2, 1)), row(2, B, fence=(1, 9))], ["fences_ascend"], id="descending epoch"),
        pytest.param([row(1, A), row(2, B)], ["fences_ascend"], id="the same fence again"),
        pytest.param(
            [row(1, A), row(2, B, key=OTHER_KEY, source_id="other")], ["fences_ascend"], id="a fence given twice"
        ),
        pytest.param(
            [row(1, A, fence=(1, 2)), row(2, B, key=OTHER_KEY)], ["fences_ascend"], id="of two revisions of a source"
        ),
        pytest.param(
            [row(1, A, fence=(1, 2), source_id=None), row(2, B, source_id=None)],
            ["fences_ascend"],
            id="of rows without a context",
        ),
        pytest.param(
            [sealed(6, A), sealed(7, B, fence=(1, 2)), ENDED], ["equal_receipts", "one_seal"], id="an end before both"
        ),
    ],
)
def test_the_auditor_finds(rows: list[Row], found: list[str]) -> None:
    assert invariants(*rows) == found
    assert invariants(*reversed(rows), *rows) == found, "in whatever order, however often"


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="nothing"),
        pytest.param([row(1, A), sealed(2, A), replay(3, B, A)], id="one effect and its replay"),
        pytest.param([sealed(1, A), sealed(1, A)], id="a row that was written twice"),
        pytest.param([row(1, A), row(2, A, position=1)], id="a claim that was granted again to its token"),
        pytest.param(
            [sealed(1, A, expires_ms=9), sealed(9, B, fence=(1, 2)), replay(10, b"c" * TOKEN_BYTES, B)],
            id="a life that expired",
        ),
        pytest.param(
            [
                sealed(1, A, expires_ms=9),
                replay(8, b"c" * TOKEN_BYTES, A),
                row(9, B, fence=(1, 2)),
                replay(10, b"d" * TOKEN_BYTES, B),
            ],
            id="an answer of the next life, whose seal's row is missing",
        ),
        pytest.param(
            [sealed(1, A), ENDED, sealed(9, B, fence=(1, 2)), replay(10, b"c" * TOKEN_BYTES, B)],
            id="a life that was ended",
        ),
        pytest.param(
            [
                sealed(5, A),
                ENDED,
                row(5, B, fence=(1, 2)),
                sealed(5, B, fence=(1, 2)),
                replay(5, b"c" * TOKEN_BYTES, B, fence=(1, 2)),
            ],
            id="a life that was ended in the same millisecond",
        ),
        pytest.param(
            [row(1, A), row(9, B, flags=TAKEOVER, fence=(1, 2)), sealed(10, B, fence=(1, 2))], id="a takeover"
        ),
        pytest.param(
            [
                row(1, A),
                row(9, B, flags=TAKEOVER, fence=(1, 2)),
                sealed(10, B, fence=(1, 2)),
                replay(11, A, B, position=SEAL_POSITION, flags=FENCED_OUT, fence=(1, 2)),
            ],
            id="a seal that was fenced out",
        ),
        pytest.param(
            [
                row(1, A),
                replay(9, B, A, position=SEAL_POSITION, flags=HEALED, fence=(1, 2)),
                replay(10, b"c" * TOKEN_BYTES, A),
            ],
            id="a commit that was healed",
        ),
        pytest.param(
            [row(1, A), row(2, A, position=RELEASE_POSITION), row(3, B, fence=(1, 2)), sealed(4, B, fence=(1, 2))],
            id="an attempt that was given back",
        ),
        pytest.param([row(1, A), row(2, B, key=b"\x08" + b"k" * 32)], id="the same fence in another shard"),
        pytest.param([row(1, A, fence=(1, 9)), row(2, B, fence=(2, 1))], id="a new epoch with a new counter"),
        pytest.param(
            [row(1, A, fence=(1, 2)), row(2, B, RowKind.CONFLICT, fence=(1, 1), winner=NO_TOKEN)], id="a conflict"
        ),
    ],
)
def test_the_auditor_accepts(rows: list[Row]) -> None:
    assert invariants(*rows) == []
    assert invariants(*reversed(rows)) == []


def test_a_report_counts_and_reads_well() -> None:
    good = check([sealed(1, A), replay(2, B, A), sealed(3, B, key=OTHER_KEY, fence=(1, 2))])
    assert (good.ok, good.rows, good.keys) == (True, 3, 2)
    assert str(good) == "3 rows over 2 keys: every promise kept"
    bad = check([sealed(1, A), replay(2, B, B)])
    assert not bad.ok
    assert str(bad).startswith("1 finding in 2 rows over 1 key\n  equal_receipts 07")
    assert AuditReport(0, 0).ok
