from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragfence import errors
from ragfence.errors import Conflict, InFlight, RagfenceError, StoreUnavailable, TerminalError, hint_on
from ragfence.wire.problems import ERRORS, REFUSALS, page, problem_of, refusal, table

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = [
    "VALIDATION.",
    "AUTH.",
    "CONFLICT.idempotency.payload_mismatch",
    "RATE_LIMIT.exceeded",
    "DEPENDENCY.timeout",
    "DEPENDENCY.unavailable",
    "TRANSIENT",
    "PROVIDER.duplicate",
]


def ours(kind: type[RagfenceError] = RagfenceError) -> Iterator[type[RagfenceError]]:
    """Every class of the tree, also those that other modules of ragfence have added to it."""
    yield kind
    for child in kind.__subclasses__():
        # A private one never leaves its module.
        if child.__module__.startswith("ragfence.") and not child.__name__.startswith("_"):
            yield from ours(child)


def test_every_error_has_a_row_and_every_row_an_error() -> None:
    assert set(ours()) == set(ERRORS)


def test_a_code_is_told_once() -> None:
    codes = [code for code, *_ in table()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_taxonomy_is_covered(family: str) -> None:
    assert any(code.startswith(family) for code, *_ in table())


def test_what_is_retryable_is_no_fault_of_the_request() -> None:
    for code, status, retryable, _, _ in table():
        assert not retryable or status in (408, 409, 429, 500, 503, 504), code
        assert not (status in (503, 504, 429) and not retryable), code


def test_a_problem_has_all_members_of_rfc_9457_and_ours() -> None:
    answer = problem_of(Conflict("known", key="k", diff=[{"op": "remove", "path": "/a"}])).answer()
    body = json.loads(answer.body)
    assert answer.header("content-type") == "application/problem+json"
    assert body == {
        "type": "urn:ragfence:problem:CONFLICT.idempotency.payload_mismatch",
        "title": "The key was used with another payload",
        "status": 409,
        "detail": "known",
        "code": "CONFLICT.idempotency.payload_mismatch",
        "retryable": False,
        "hint": hint_on("http", Conflict.default_hint),
        "key": "k",
        "diff": [{"op": "remove", "path": "/a"}],
    }


def test_whoever_may_try_again_is_told_when() -> None:
    answer = problem_of(InFlight("busy", retry_after_ms=1500)).answer()
    assert answer.header("retry-after") == "2"
    assert json.loads(answer.body)["retry_after"] == 2
    assert problem_of(StoreUnavailable("away")).answer().header("retry-after") == "1"
    assert refusal("RATE_LIMIT.exceeded", retry_after=30).answer().header("retry-after") == "30"
    assert problem_of(Conflict("no")).answer().header("retry-after") == ""


def test_an_error_of_the_users_own_has_the_row_of_its_parent_and_its_own_code() -> None:
    class CardRefused(TerminalError):
        code = "CARD.refused"

    problem = problem_of(CardRefused("the card was refused"))
    assert (problem.status, problem.code, problem.retryable) == (422, "CARD.refused", False)


def test_a_receipt_is_not_shown() -> None:
    assert "receipt" not in problem_of(Conflict("known", receipt="somebody's")).body()


def test_every_refusal_says_what_to_do_next() -> None:
    assert all(row.hint and row.title for row in REFUSALS.values())
    assert all(row.title for row in ERRORS.values())


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == page(), "python -m ragfence.wire.problems > docs/errors.md"


def test_no_error_of_ragfence_is_left_out_of_the_tree() -> None:
    assert {kind.__module__ for kind in ours()} == {errors.__name__}
