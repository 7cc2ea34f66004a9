"""What the contract answers beside what was performed: replays, conflicts, what is in progress, what came too late."""

from __future__ import annotations

import contextlib
import functools
import json
from email.utils import formatdate
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.core.records import KeyRecord
from ragfence.engine.claim_block import ReplayedClaim, failed
from ragfence.engine.requests import Request
from ragfence.errors import Conflict, InFlight, RagfenceError
from ragfence.server import stored_response
from ragfence.wire.headers import KEY_HEADER, format_key, parse_key
from ragfence.wire.messages import Answer, Headers, values_of
from ragfence.wire.problems import Problem, RequestRefused, problem_of, refusal, whole_seconds

MOST_KEPT_BYTES = 2 << 10
"""of a result whose answer is kept in memory"""
RETRY_AFTER_MS = 1000
"""how soon to ask again: a live lease is renewed, so its end says nothing"""


class ReplayedResponse:
    """The last answer of a request that is remembered: from the same record it is made only once."""

    __slots__ = ("answer", "record")

    def __init__(self) -> None:
        self.record: KeyRecord | None = None
        self.answer: Answer | None = None


class HttpClaim(NamedTuple):
    """An HTTP request that may be claimed."""

    key: str
    request: Request
    place: str
    """method and template"""
    root: str
    """under which prefix the application is mounted"""
    budget_s: float | None = None
    """for how long the client waits"""
    give_up_at: float | None = None
    """until when, by the clock of the loop"""
    kept: ReplayedResponse | None = None


class ContractResponses:
    """`status_path`: where a 202 is asked how far it is; `ttl_ms`: how long an outcome is kept, 0 for ever."""

    def __init__(self, policy: Policy, ttl_ms: int, status_path: str) -> None:
        self._policy = policy
        self._ttl_ms = ttl_ms
        self._status_path = status_path

    def refused(self, asked: HttpClaim, error: RagfenceError) -> Answer:
        key = asked.key
        if isinstance(error, Conflict):
            problem = Problem(
                status=self._policy.on_conflict.status,
                code=error.code,
                title="The key was used before, for another request",
                retryable=False,
                detail=f"Idempotency-Key {key!r} was used before on {asked.place}, for another request",
                hint="use a new key for another request, or send what was sent first",
                extras={"key": key, "diff": _of_the_body(error.diff), "differs": _parts(error.diff)},
            )
            return problem.answer(told_of(key, "CONFLICT"))
        if isinstance(error, InFlight):
            return self.in_progress(asked)
        return problem_of(error, key=key).answer(told_of(key, "IN_PROGRESS"))

    def in_progress(self, asked: HttpClaim) -> Answer:
        key = asked.key
        if self._policy.http.in_progress == 202:
            return self.accepted(asked.request.operation, key, asked.root)
        busy = InFlight(
            f"a request with Idempotency-Key {key!r} is being performed",
            hint="wait, then send it again with the same key",
            key=key,
            retry_after_ms=RETRY_AFTER_MS,
        )
        return problem_of(busy).answer(told_of(key, "IN_PROGRESS"))

    def accepted(self, operation: Operation, key: str, root: str) -> Answer:
        told: dict[str, Any] = {"key": key, "state": "in_progress", "retry_after": whole_seconds(RETRY_AFTER_MS)}
        headers = {"retry-after": str(told["retry_after"]), "cache-control": "no-store"}
        if self._status_path:
            method, _, template = operation.action.partition(" ")
            query = urlencode({"key": key, "method": method, "route": template})
            told["status_url"] = headers["location"] = f"{root}{self._status_path}?{query}"
        body = json.dumps(told, separators=(",", ":")).encode()
        answer = stored_response.whole(Answer(202, (("content-type", "application/json"),), body))
        return answer.with_headers(headers | told_of(key, "IN_PROGRESS"))

    def out_of_time(self, asked: HttpClaim, *, begun: bool) -> Answer:
        # Not begun: the store has not said yet whether there is a claim, and the address of a 202 would know nothing.
        if begun and self._policy.http.in_progress == 202:
            return self.accepted(asked.request.operation, asked.key, asked.root)
        late = refusal(
            "DEPENDENCY.timeout",
            f"not done within {asked.budget_s:g} s; it goes on",
            key=asked.key,
            retry_after=whole_seconds(RETRY_AFTER_MS),
        )
        return late.answer(told_of(asked.key, "IN_PROGRESS"))

    def replay(self, asked: HttpClaim, replayed: ReplayedClaim) -> Answer:
        kept, record = asked.kept, replayed.record
        if kept is None or len(record.result) > MOST_KEPT_BYTES:
            return self.replayed(replayed.receipt(), asked.key)
        # All of it: a record that differs in anything may tell something else.
        if kept.answer is None or kept.record != record:
            kept.record, kept.answer = record, self.replayed(replayed.receipt(), asked.key)
        return kept.answer

    def replayed(self, receipt: Receipt, key: str) -> Answer:
        told = told_of(key, "HIT") | {"idempotency-status": "replayed"} | self.expiry(receipt)
        if receipt.failed:  # sealed by other means than an answer
            return problem_of(failed(receipt), key=key).answer(told)
        kept = stored_response.from_result(receipt.result, key)
        # None of what is told is ever kept, so nothing has to be replaced.
        return Answer(kept.status, (*kept.headers, *told.items()), kept.body, kept.complete)

    def expiry(self, receipt: Receipt) -> dict[str, str]:
        if not self._ttl_ms or not receipt.sealed_at_ms:
            return {}
        return {"idempotency-expires": _date((receipt.sealed_at_ms + self._ttl_ms) // 1000)}


@functools.lru_cache(maxsize=1024)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def told_of(key: str, status: str) -> dict[str, str]:
    """What the headers tell of the key."""
    told = {"x-idempotency-key": format_key(key)}
    return told | {"x-idempotency-status": status} if status else told


def unexpected(headers: Headers) -> Answer:
    """The answer to a request that failed in a way nobody foresaw: it tells its key, if it has one.

    Nothing of the error: a message may hold what another tenant has sent. The log has it all.
    """
    told: dict[str, str] = {}
    if len(given := values_of(headers, KEY_HEADER)) == 1:
        with contextlib.suppress(RequestRefused):
            told = told_of(parse_key(given[0]), "MISS")
    return refusal("TRANSIENT.unexpected").answer(told)


def _of_the_body(diff: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The patch of the body alone: that is the document the client has."""
    if diff is None:
        return None
    return [
        {name: value.removeprefix("/body") if name in ("path", "from") else value for name, value in operation.items()}
        for operation in diff
        if _part(operation) == "body"
    ]


def _parts(diff: list[dict[str, Any]] | None) -> list[str] | None:
    return None if diff is None else sorted({_part(operation) for operation in diff})


def _part(operation: dict[str, Any]) -> str:
    return (*str(operation["path"]).split("/"), "body")[1]
