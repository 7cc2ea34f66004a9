"""Requests turn into claims, seals and leases past the constructors: every field must be in its place."""

from __future__ import annotations

import pytest

from ragfence.core.decisions import Claim, Granted, LeaseRef, Mode, Seal
from ragfence.core.layout import State
from ragfence.core.operations import FenceNumber, Operation
from ragfence.core.policy import Policy
from ragfence.core.records import KeyRecord
from ragfence.engine.requests import Request

RULES = Policy.from_mapping({"kinds": {"ticket": {"ttl_hours": 200, "max_attempts": 7}}}).for_kind("ticket")
TOKEN, WINNER = b"t" * 12, b"w" * 12


@pytest.fixture(params=[None, 3], ids=["keyed", "sequenced"])
def request_of(request: pytest.FixtureRequest) -> Request:
    return Request.of(
        Operation(kind="ticket", source_id="a", sequence=request.param, tenant="acme"),
        b"f" * 16,
        RULES,
        context=b'{"kind":"ticket"}',
        owner="host:1",
        kept_payload=b'{"a":1}',
        diff_wanted=True,
    )


def test_a_claim_says_all_that_its_request_says(request_of: Request) -> None:
    assert request_of.claim(TOKEN, 4, 5) == Claim(
        key=request_of.operation.key,
        fingerprint=b"f" * 16,
        token=TOKEN,
        mode=mode_of(request_of),
        source=request_of.source,
        sequence=request_of.operation.sequence,
        lease_ms=RULES.lease_ms,
        max_attempts=7,
        pending_ttl_ms=RULES.pending_ttl_ms,
        source_ttl_ms=RULES.source_ttl_ms,
        kind="ticket",
        owner="host:1",
        payload=b'{"a":1}',
        position=4,
        waited_ms=5,
        context=b'{"kind":"ticket"}',
        row_on_conflict=False,
    )


def test_a_lease_says_all_that_its_request_says(request_of: Request) -> None:
    assert request_of.lease_ref(TOKEN, epoch=9) == LeaseRef(
        key=request_of.operation.key,
        token=TOKEN,
        mode=mode_of(request_of),
        source=request_of.source,
        lease_ms=RULES.lease_ms,
        pending_ttl_ms=RULES.pending_ttl_ms,
        source_ttl_ms=RULES.source_ttl_ms,
        epoch=9,
        context=b'{"kind":"ticket"}',
    )


@pytest.mark.parametrize("winner", [bytes(12), WINNER])
def test_a_seal_says_all_that_its_request_says(request_of: Request, winner: bytes) -> None:
    record = KeyRecord(State.HELD, b"f" * 16, TOKEN, FenceNumber(9, 2), attempt=1, first_seen_ms=10, when_ms=20)
    sealed = request_of.seal(
        Granted(record),
        effect_id="ef_1",
        result=b"tx",
        failed=True,
        error="E.1",
        flags=2,
        waited_ms=6,
        winner=winner,
    )
    assert sealed == Seal(
        key=request_of.operation.key,
        token=TOKEN,
        fence=FenceNumber(9, 2),
        mode=mode_of(request_of),
        source=request_of.source,
        failed=True,
        effect_id="ef_1",
        result=b"tx",
        error="E.1",
        sequence=request_of.operation.sequence,
        ttl_ms=200 * 3_600_000,
        source_ttl_ms=RULES.source_ttl_ms,
        flags=2,
        waited_ms=6,
        context=b'{"kind":"ticket"}',
        duplicate=winner == WINNER,
        winner=winner,
    )


def test_long_texts_are_looked_at_one_by_one() -> None:
    long = "x" * 1000
    operation = Operation(kind="ticket", source_id=long, revision=long, action=long)
    assert (operation.source_id, operation.revision, operation.action) == (long, long, long)


def mode_of(request: Request) -> Mode:
    return Mode.KEYED if request.operation.sequence is None else Mode.SEQUENCED
