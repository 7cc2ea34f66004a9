"""What a request asks for, in the contract's terms: its key, its fingerprint, and how long its client waits.

A retry with the same bytes comes to the same claim, so what was read once is remembered: a request that comes again is
neither parsed, nor checked, nor brought into its canonical form. Its bytes are compared, by their sha256. Nothing that
is remembered can be out of date: it is a function of who sent what to where. What is not (the client's patience, its
correlation id) is read every time.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cachetools import LRUCache

from ragfence.core.hashing import ContentKey, digest
from ragfence.core.operations import Operation
from ragfence.engine.requests import acting_key
from ragfence.errors import RagfenceError
from ragfence.server.responses import MOST_KEPT_BYTES, HttpClaim, ReplayedResponse, told_of
from ragfence.wire.headers import KEY_HEADER, budget_in, check_required, key_of, missing_key
from ragfence.wire.messages import Answer, Call, Headers, first_of, headers_from
from ragfence.wire.problems import RequestRefused, problem_of

if TYPE_CHECKING:
    from ragfence.core.policy import Policy
    from ragfence.engine.claim_block import BatchedClaims

KIND: Final = "http"
"""the kind of these operations; the policy may have rules for it under `kinds`"""
MOST_BYTES: Final = 8 << 20
"""of what is remembered, per tenant and process"""

_DECIDE: Final = frozenset({b"idempotency-key", b"content-type", b"content-encoding", b"if-match", b"if-none-match"})
"""headers by which a request is told from another, or refused"""
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{32,}")
_OF_THE_MOMENT: Final = frozenset({b"x-request-timeout", b"x-correlation-id", b"x-request-id"})
_OVERHEAD: Final = 2048 + 2 * MOST_KEPT_BYTES
"""bytes that an entry takes beside its payload, with its answer"""


class RequestHead(NamedTuple):
    """A request without its body."""

    name: tuple[str | bytes, ...]
    """all that decides what it is; equal for a retry"""
    passing: Headers
    """headers that may be others the next time"""


class _Remembered(NamedTuple):
    body_sha256: bytes
    asked: HttpClaim
    size: int


class RequestReader:
    """Reads the requests of one tenant."""

    def __init__(self, claims: BatchedClaims, policy: Policy, *, most_bytes: int = MOST_BYTES) -> None:
        self._claims = claims
        self._required = policy.require_headers
        conflict = policy.on_conflict
        # Over HTTP a conflict shows what differs, unless the policy says otherwise.
        self._include_diff = conflict.include_diff or "include_diff" not in conflict.model_fields_set
        self._decide = _DECIDE | {name.lower().encode("latin-1", "replace") for name in self._required}
        self._known: LRUCache[tuple[str | bytes, ...], _Remembered] = LRUCache(most_bytes, lambda each: each.size)

    def head_of(self, scope: Any, principal: str, template: str = "") -> RequestHead:
        decide = self._decide
        name: list[str | bytes] = [principal, scope["method"], scope["path"], template, scope.get("root_path", "")]
        name.append(scope.get("query_string", b""))
        name.append(acting_key.get())  # its rows tell the key with which it was sent
        passing = []
        for pair in scope["headers"]:
            header = pair[0].lower()
            if header in decide:
                name += pair
            elif header in _OF_THE_MOMENT:
                passing.append(pair)
        return RequestHead(tuple(name), headers_from(passing) if passing else ())

    def may_know(self, head: RequestHead) -> bool:
        """Whether it is worth while to have its body."""
        return head.name in self._known

    def known(self, head: RequestHead, body: bytes, within_s: float | None = None) -> HttpClaim | None:
        """What this request asks for, if it was read before. `within_s`: how long to wait, unless the client says."""
        found = self._known.get(head.name)
        if found is None or sha256(body).digest() != found.body_sha256:
            return None
        asked = found.asked
        if head.passing:
            try:
                within_s = budget_in(head.passing) or within_s
            except RequestRefused:
                return None  # whoever reads it refuses it
            if correlation_id := _correlation_in(head.passing):
                asked = self._correlated(asked, correlation_id)
        return asked if within_s is None else asked._replace(budget_s=within_s, give_up_at=_now() + within_s)

    def checked(
        self, call: Call, principal: str, *, head: RequestHead | None = None, within_s: float | None = None
    ) -> HttpClaim | Answer | None:
        """What may be claimed, or why not. None: the policy does not require a key, and there is none.

        With its `head` it is remembered.
        """
        try:
            return self._asked(call, principal, head, within_s)
        except RequestRefused as refused:
            return refused.problem.answer()
        except RagfenceError as refused:
            return problem_of(refused).answer()

    def _asked(
        self, call: Call, principal: str, head: RequestHead | None, within_s: float | None
    ) -> HttpClaim | Answer | None:
        check_required(call, self._required)
        budget_s = budget_in(call.headers) or within_s
        key = key_of(call)
        if key is None:
            if any(name.lower() == KEY_HEADER for name in self._required):
                raise missing_key()
            return None
        stored = stored_key(key, self._claims.content_key())
        operation = operation_of(stored, principal, call.method, call.template, self._claims.tenant)
        payload = call.payload()
        try:
            request = self._claims.request(
                operation,
                payload,
                route=operation.action,
                kept=call.kept_payload(),
                include_diff=self._include_diff,
            )
        except RagfenceError as error:
            return problem_of(error, key=key).answer(told_of(key, ""))
        asked = HttpClaim(key, request, f"{call.method} {call.template}", call.root)
        if head is not None:
            self._remember(head, call.body, asked._replace(kept=ReplayedResponse()))
        if correlation_id := _correlation_in(call.headers):
            asked = self._correlated(asked, correlation_id)
        return asked if budget_s is None else asked._replace(budget_s=budget_s, give_up_at=_now() + budget_s)

    def _correlated(self, asked: HttpClaim, correlation_id: str) -> HttpClaim:
        request = self._claims.with_call(
            asked.request, correlation_id=correlation_id, route=asked.request.operation.action
        )
        return asked._replace(request=request)

    def _remember(self, head: RequestHead, body: bytes, asked: HttpClaim) -> None:
        size = _OVERHEAD + len(asked.request.kept_payload) + sum(map(len, head.name))
        with suppress(ValueError):  # larger than the whole cache
            self._known[head.name] = _Remembered(sha256(body).digest(), asked, size)


def stored_key(key: str, content_key: ContentKey | None) -> str:
    """The Idempotency-Key as it is stored.

    One that looks like a digest may be one of the content, as those of a client with `run=` are: a tenant whose digests
    are keyed has it keyed, too.
    """
    if content_key is None or not _DIGEST.fullmatch(key):
        return key
    return content_key.digest("ragfence/http-key/1", key.encode()).hex()


def operation_of(key: str, principal: str, method: str, template: str, tenant: str = "") -> Operation:
    """The scope of a key: the tenant, who asks, the method and the route."""
    action = f"{method} {template}"
    if len(action) > 512 or not action.isprintable() or not action.isascii():
        action = f"{method} {digest('ragfence/http-route/1', template.encode('utf-8', 'replace')).hex()}"
    return Operation(kind=KIND, source_type=principal, source_id=key, action=action, tenant=tenant)


def _correlation_in(headers: Headers) -> str:
    text = first_of(headers, "x-correlation-id") or first_of(headers, "x-request-id")
    return text if len(text) <= 255 and text.isascii() and text.isprintable() else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
