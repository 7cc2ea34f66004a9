"""Retries are answered before any route is looked up: what was read once is remembered, and need not be read again.

A retry with the same bytes comes to the same claim, so a request that comes again is neither parsed, nor checked, nor
brought into its canonical form. Its bytes are compared, by their sha256. What is remembered is never out of date: it is
a function of who sent what to where. What is not (the client's patience, its correlation id) is read every time.
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
from ragfence.server.asgi import App, ClientGone, Message, Receive, Scope, Send, read_body, send_answer
from ragfence.server.fair_shares import SHARE
from ragfence.server.load_shedding import READS
from ragfence.server.responses import MAX_CACHED_BYTES, HttpClaim, ReplayedResponse, key_headers
from ragfence.wire.headers import KEY_HEADER, budget_in, check_required, key_of, missing_key
from ragfence.wire.messages import Answer, Call, Headers, first_of, headers_from
from ragfence.wire.problems import RequestRefused, problem_of

if TYPE_CHECKING:
    from ragfence.core.policy import Policy
    from ragfence.engine.claim_block import BatchedClaims
    from ragfence.server.contract import Contract, Perform, StartedRequest
    from ragfence.server.tenant_pool import TenantSession

KIND: Final = "http"
"""The kind of these operations; the policy may have rules for it under `kinds`."""
MAX_BYTES: Final = 8 << 20
"""Size of what is remembered, per tenant and process."""

_DECISIVE: Final = frozenset({b"idempotency-key", b"content-type", b"content-encoding", b"if-match", b"if-none-match"})
"""Headers that make one request different from another, or refused."""
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{32,}")
_TRANSIENT: Final = frozenset({b"x-request-timeout", b"x-correlation-id", b"x-request-id"})
_OVERHEAD: Final = 2048 + 2 * MAX_CACHED_BYTES
"""Bytes of an entry in addition to its payload, including its answer."""


class RequestHead(NamedTuple):
    """A request without its body."""

    name: tuple[str | bytes, ...]
    """Everything that decides what the request is; equal for a retry."""
    transient: Headers
    """Headers that may differ in a retry."""


class _CachedRequest(NamedTuple):
    body_sha256: bytes
    claim: HttpClaim
    size: int


class RequestReader:
    """Reads the requests of one tenant: which key, which fingerprint, how long the client waits."""

    def __init__(self, claims: BatchedClaims, policy: Policy, *, max_bytes: int = MAX_BYTES) -> None:
        self._claims = claims
        self._required = policy.require_headers
        conflict = policy.on_conflict
        # Over HTTP a conflict shows what differs, unless the policy says otherwise.
        self._include_diff = conflict.include_diff or "include_diff" not in conflict.model_fields_set
        self._decisive = _DECISIVE | {name.lower().encode("latin-1", "replace") for name in self._required}
        self._cache: LRUCache[tuple[str | bytes, ...], _CachedRequest] = LRUCache(max_bytes, lambda each: each.size)

    def head_of(self, scope: Any, principal: str, template: str = "") -> RequestHead:
        decisive = self._decisive
        name: list[str | bytes] = [principal, scope["method"], scope["path"], template, scope.get("root_path", "")]
        name.append(scope.get("query_string", b""))
        name.append(acting_key.get())  # decision rows name the API key that sent the request
        transient = []
        for pair in scope["headers"]:
            header = pair[0].lower()
            if header in decisive:
                name += pair
            elif header in _TRANSIENT:
                transient.append(pair)
        return RequestHead(tuple(name), headers_from(transient) if transient else ())

    def may_know(self, head: RequestHead) -> bool:
        """Returns whether `known` needs the body to decide."""
        return head.name in self._cache

    def known(self, head: RequestHead, body: bytes, within_s: float | None = None) -> HttpClaim | None:
        """Returns the claim of a request that was read before, or None.

        Args:
            head: The request without its body.
            body: Its body.
            within_s: How long to wait, unless the client says.
        """
        found = self._cache.get(head.name)
        if found is None or sha256(body).digest() != found.body_sha256:
            return None
        claim = found.claim
        if head.transient:
            try:
                within_s = budget_in(head.transient) or within_s
            except RequestRefused:
                return None  # `checked` refuses it
            if correlation_id := _correlation_in(head.transient):
                claim = self._correlated(claim, correlation_id)
        return claim if within_s is None else claim._replace(budget_s=within_s, give_up_at=_now() + within_s)

    def checked(
        self, call: Call, principal: str, *, head: RequestHead | None = None, within_s: float | None = None
    ) -> HttpClaim | Answer | None:
        """Returns the claim of a request, or the answer that refuses it.

        Returns None for a request without a key, if the policy does not require one. With its `head` the claim is
        remembered.
        """
        try:
            return self._read(call, principal, head, within_s)
        except RequestRefused as refused:
            return refused.problem.answer()
        except RagfenceError as refused:
            return problem_of(refused).answer()

    def _read(
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
            return problem_of(error, key=key).answer(key_headers(key, ""))
        claim = HttpClaim(key, request, f"{call.method} {call.template}", call.root)
        if head is not None:
            self._remember(head, call.body, claim._replace(cached=ReplayedResponse()))
        if correlation_id := _correlation_in(call.headers):
            claim = self._correlated(claim, correlation_id)
        return claim if budget_s is None else claim._replace(budget_s=budget_s, give_up_at=_now() + budget_s)

    def _correlated(self, claim: HttpClaim, correlation_id: str) -> HttpClaim:
        request = self._claims.with_call(
            claim.request, correlation_id=correlation_id, route=claim.request.operation.action
        )
        return claim._replace(request=request)

    def _remember(self, head: RequestHead, body: bytes, claim: HttpClaim) -> None:
        size = _OVERHEAD + len(claim.request.kept_payload) + sum(map(len, head.name))
        with suppress(ValueError):  # larger than the whole cache
            self._cache[head.name] = _CachedRequest(sha256(body).digest(), claim, size)


class Write:
    """A write of the ingestion API. Owns the claim of its key from `replay` until `answer` executes it, or `close`."""

    def __init__(self, session: TenantSession, scope: Scope, principal: str) -> None:
        self._contract: Contract = session.contract
        self._within_s = session.answer_within_s
        self._principal = principal
        self._head = self._contract.reader.head_of(scope, principal)
        self._started: StartedRequest | None = None

    @property
    def may_be_known(self) -> bool:
        """Whether `replay` needs the body."""
        return self._contract.reader.may_know(self._head)

    @property
    def is_claimed(self) -> bool:
        return self._started is not None

    async def replay(self, body: bytes) -> Answer | None:
        """Claims the key of a request that was read before; returns the answer if that is known already."""
        claim = self._contract.reader.known(self._head, body, self._within_s)
        if claim is None:
            return None
        started = await self._contract.start(claim)
        if isinstance(started, Answer):
            return started
        self._started = started
        return None

    async def answer(self, call: Call, perform: Perform) -> Answer:
        """Executes `perform` once for the key, and answers as the contract says."""
        started, self._started = self._started, None
        if started is None:
            claim = self._contract.reader.checked(call, self._principal, head=self._head, within_s=self._within_s)
            answer = await self._contract.start(claim)
            if isinstance(answer, Answer):
                return answer
            started = answer
        return await self._contract.execute(started, perform)

    def close(self) -> None:
        """Releases a claim that was not executed, for example because the route refused the request."""
        if self._started is not None:
            started, self._started = self._started, None
            started.block.discard()


class ReplayMiddleware:
    """Makes the `Write` of each write, answers those whose answer is known, and closes it.

    Inside of `AuthMiddleware`, which identifies the caller, and of `LoadShedding`, which bounds the body.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = scope.get("state", {}).get("session") if scope["type"] == "http" else None
        if session is None or scope["method"] in READS or SHARE in scope["state"]:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        write = state["write"] = Write(session, scope, state["caller"].principal)
        try:
            if write.may_be_known:
                try:
                    body = await read_body(receive)
                except ClientGone:
                    await self._app(scope, receive, send)
                    return
                if (answer := await write.replay(body)) is not None:
                    await send_answer(send, answer)
                    return
                receive = _with_body(body, receive)
            await self._app(scope, receive, send)
        finally:
            write.close()


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Receives a body that was read already, then whatever comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def stored_key(key: str, content_key: ContentKey | None) -> str:
    """Returns the Idempotency-Key as it is stored.

    A key that looks like a digest may be a digest of the content, as those of a client with `run=` are: for a tenant
    whose digests are keyed, the key is keyed as well.
    """
    if content_key is None or not _DIGEST.fullmatch(key):
        return key
    return content_key.digest("ragfence/http-key/1", key.encode()).hex()


def operation_of(key: str, principal: str, method: str, template: str, tenant: str = "") -> Operation:
    """Returns the operation of a key, whose scope is tenant, caller, method and route."""
    action = f"{method} {template}"
    if len(action) > 512 or not action.isprintable() or not action.isascii():
        action = f"{method} {digest('ragfence/http-route/1', template.encode('utf-8', 'replace')).hex()}"
    return Operation(kind=KIND, source_type=principal, source_id=key, action=action, tenant=tenant)


def _correlation_in(headers: Headers) -> str:
    text = first_of(headers, "x-correlation-id") or first_of(headers, "x-request-id")
    return text if len(text) <= 255 and text.isascii() and text.isprintable() else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
