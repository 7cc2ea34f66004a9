"""What is sent again, when, and for how long: with a real server that loses, delays and cuts off its answers."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence import Document, errors
from ragfence.client import ApiError, ApiRefused, ApiUnavailable, RetryPolicy
from ragfence.core.receipts import Decision
from tests.client.conftest import Asks, Opening, Slept
from tests.client.scripted import RECEIPT, Said, Scripted, problem, said

DOCUMENT = Document("a", "some text", {"team": "people"})
LOST = Said(lost=True)
DONE = said(RECEIPT, 201)


def test_a_lost_reply_is_asked_for_again_under_the_same_key(client: Asks, server: Scripted) -> None:
    server.script(LOST, LOST, DONE)
    receipt = client.ingest(DOCUMENT)
    assert receipt.snippet_ids == ("sn_1", "sn_2")
    assert receipt.decision is Decision.NEW
    assert receipt.flags.takeover
    assert receipt.fence == "1.7"
    assert len(server.asked) == 3
    assert len({asked.key for asked in server.asked}) == 1
    assert len({asked.body for asked in server.asked}) == 1


def test_a_reply_that_is_cut_off_is_asked_for_again(client: Asks, server: Scripted) -> None:
    server.script(Said(201, DONE.body, cut=20), DONE)
    assert client.ingest(DOCUMENT).effect_id == "ef_1"
    assert len({asked.key for asked in server.asked}) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_sent_again(client: Asks, server: Scripted, status: int) -> None:
    server.script(Said(status, b"<html>oh</html>"), DONE)
    assert client.ingest(DOCUMENT).effect_id == "ef_1"
    assert [asked.key for asked in server.asked] == [server.asked[0].key] * 2


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 408, 410, 412, 413, 422, 501, 505])
def test_nothing_else_is_sent_again(client: Asks, server: Scripted, slept: Slept, status: int) -> None:
    server.script(Said(status, b"no", {"retry-after": "1"}))
    with pytest.raises(ApiRefused) as refused:
        client.ingest(DOCUMENT)
    assert refused.value.status == status
    assert refused.value.code == f"HTTP.{status}"
    assert not refused.value.retryable
    assert len(server.asked) == 1
    assert not slept.pauses


def test_a_500_of_which_the_server_says_that_it_is_final_is_not_sent_again(client: Asks, server: Scripted) -> None:
    server.script(problem(errors.EmbedderInvalid("NaN")))
    with pytest.raises(errors.EmbedderInvalid, match="NaN"):
        client.ingest(DOCUMENT)
    assert len(server.asked) == 1


def test_retry_after_is_waited_for(client: Asks, server: Scripted, slept: Slept) -> None:
    server.script(problem("RATE_LIMIT.exceeded", retry_after="3"), DONE)
    client.ingest(DOCUMENT)
    (pause,) = slept.pauses
    assert 3.0 <= pause <= 3.1


def test_retry_after_as_a_date_counts_by_the_clock_of_the_server(client: Asks, server: Scripted, slept: Slept) -> None:
    there = datetime.now(UTC) - timedelta(days=400)  # a clock that is wrong
    dates = {"date": format_datetime(there, True), "retry-after": format_datetime(there + timedelta(seconds=4), True)}
    server.script(Said(503, b"", dates), DONE)
    client.ingest(DOCUMENT)
    (pause,) = slept.pauses
    assert 4.0 <= pause <= 4.1


def test_a_retry_after_beyond_the_budget_is_raised_at_once(client: Asks, server: Scripted, slept: Slept) -> None:
    server.script(problem("RATE_LIMIT.exceeded", retry_after="30"))
    with pytest.raises(ApiUnavailable) as limited:
        client.ingest(DOCUMENT)
    assert limited.value.code == "RATE_LIMIT.exceeded"
    assert limited.value.retry_after_s == 30.0
    assert limited.value.status == 429
    assert limited.value.retryable
    assert isinstance(limited.value, errors.TransientError)
    assert not slept.pauses
    assert len(server.asked) == 1


def test_the_budget_ends_it(client: Asks, server: Scripted, slept: Slept) -> None:
    server.script(LOST)
    with pytest.raises(ApiUnavailable, match=r"did not answer") as lost:
        client.ingest(DOCUMENT)
    assert lost.value.code == "DEPENDENCY.unavailable"
    assert lost.value.__cause__ is not None
    assert sum(slept.pauses) < 10.0
    assert len(slept.pauses) >= 5
    assert len({asked.key for asked in server.asked}) == 1
    told = [float(asked.headers["x-request-timeout"]) for asked in server.asked]
    assert told[0] == 5.0
    assert told == sorted(told, reverse=True)
    assert told[-1] < 5.0


def test_without_a_budget_everything_is_sent_once(opened: Opening, server: Scripted, slept: Slept) -> None:
    server.script(Said(503, b""))
    client = opened(server.url, "rf_secret", slept=slept, retry=RetryPolicy(budget_s=0))
    with pytest.raises(ApiUnavailable):
        client.ingest(DOCUMENT)
    assert len(server.asked) == 1
    assert server.asked[0].headers["x-request-timeout"] == "5.000"


def test_a_server_that_says_nothing_is_a_timeout(opened: Opening, server: Scripted) -> None:
    server.script(Said(silent=True))
    client = opened(server.url, timeout_s=0.05, retry=RetryPolicy(budget_s=0))
    with pytest.raises(ApiUnavailable) as late:
        client.ingest(DOCUMENT)
    assert late.value.code == "DEPENDENCY.timeout"


def test_a_reply_that_never_comes_is_asked_for_again(opened: Opening, server: Scripted, slept: Slept) -> None:
    server.script(Said(silent=True), DONE)
    assert opened(server.url, slept=slept, timeout_s=0.05).ingest(DOCUMENT).effect_id == "ef_1"
    assert len({asked.key for asked in server.asked}) == 1


def test_nobody_listens(opened: Opening, slept: Slept) -> None:
    with Scripted(DONE) as gone:
        url = gone.url
    client = opened(url, slept=slept, retry=RetryPolicy(budget_s=1))
    with pytest.raises(ApiUnavailable, match="ConnectError"):
        client.stats()


@given(failures=st.integers(1, 60), base_s=st.floats(0, 5), cap_s=st.floats(0, 60), seed=st.integers())
def test_a_pause_is_between_nothing_and_its_limit(failures: int, base_s: float, cap_s: float, seed: int) -> None:
    """0 <= pause <= min(cap, base * 2^n) before the attempt that follows n + 1 failures."""
    pause = RetryPolicy(base_s, cap_s).pause_s(failures, random.Random(seed))
    assert 0.0 <= pause <= min(cap_s, base_s * 2.0 ** (failures - 1))


def test_pauses_are_spread_over_all_of_their_range() -> None:
    dice, policy = random.Random(7), RetryPolicy()
    pauses = [policy.pause_s(4, dice) for _ in range(400)]
    for tenth in range(10):
        assert any(0.08 * tenth <= pause <= 0.08 * (tenth + 1) for pause in pauses)


def test_in_flight_is_waited_for(client: Asks, server: Scripted, slept: Slept) -> None:
    busy = problem(errors.InFlight("somebody is at it", retry_after_ms=1000))
    assert busy.status == 409
    server.script(busy, busy, DONE)
    assert client.ingest(DOCUMENT).effect_id == "ef_1"
    assert len({asked.key for asked in server.asked}) == 1
    assert all(1.0 <= pause <= 1.1 for pause in slept.pauses)


def test_in_flight_beyond_the_budget_is_raised(client: Asks, server: Scripted) -> None:
    server.script(problem(errors.InFlight("somebody is at it", retry_after_ms=1000)))
    with pytest.raises(errors.InFlight, match="somebody") as busy:
        client.ingest(DOCUMENT)
    assert busy.value.retry_after_ms == 1000
    assert 8 <= len(server.asked) <= 11


STATUS = "/v1/idempotency?key=k&method=POST&route=%2Fv1%2Fdocuments"
ACCEPTED = said({"state": "in_progress"}, 202, retry_after="1", location=STATUS)
FORGOTTEN = problem("VALIDATION.idempotency.key_unknown")


def test_a_202_is_followed_until_it_is_done(client: Asks, server: Scripted) -> None:
    server.script(ACCEPTED, ACCEPTED, LOST, ACCEPTED, DONE)
    assert client.ingest(DOCUMENT).effect_id == "ef_1"
    assert [(asked.method, asked.path) for asked in server.asked] == [("POST", "/v1/documents"), *[("GET", STATUS)] * 4]
    assert all(asked.headers["authorization"] == "Bearer rf_secret" for asked in server.asked)


def test_an_outcome_that_nobody_keeps_is_sent_for_again(client: Asks, server: Scripted) -> None:
    """The performer gave its key back: it died, or a store failed."""
    server.script(ACCEPTED, FORGOTTEN, DONE)
    assert client.ingest(DOCUMENT).effect_id == "ef_1"
    assert [asked.method for asked in server.asked] == ["POST", "GET", "POST"]
    assert server.asked[0].key == server.asked[2].key


def test_an_outcome_that_is_an_error_is_raised(client: Asks, server: Scripted) -> None:
    server.script(ACCEPTED, problem(errors.Stale("older than 7", newest=7)))
    with pytest.raises(errors.Stale) as stale:
        client.ingest(DOCUMENT)
    assert stale.value.newest == 7


def test_a_202_that_goes_on_is_in_flight_and_says_where_to_ask(client: Asks, server: Scripted) -> None:
    server.script(ACCEPTED)
    with pytest.raises(errors.InFlight) as busy:
        client.ingest(DOCUMENT)
    assert busy.value.details["status_url"] == server.url + STATUS


def test_the_api_key_is_not_sent_to_where_a_202_points_elsewhere(client: Asks, server: Scripted) -> None:
    with Scripted(DONE) as other:
        server.script(said({}, 202, retry_after="1", location=f"{other.url}/v1/idempotency"))
        with pytest.raises(ApiError, match="another server"):
            client.ingest(DOCUMENT)
        assert not other.asked


def test_a_build_is_waited_for_longer_than_other_calls(client: Asks, server: Scripted, slept: Slept) -> None:
    built = {"index_hash": "ab" * 32, "decision": "new", "state": "sealed", "rows": 7, "at": "2026-01-01T00:00:00Z"}
    server.script(*[ACCEPTED] * 60, said(built, 201))
    build = client.build(wait_s=600)
    assert (build.index_hash, build.decision, build.rows) == ("ab" * 32, "new", 7)
    assert sum(slept.pauses) > 59
    # One attempt is never longer than the timeout, however long the build may take.
    assert {asked.headers["x-request-timeout"] for asked in server.asked} == {"5.000"}
    server.script(ACCEPTED)
    with pytest.raises(errors.InFlight):
        client.build(wait_s=5)
