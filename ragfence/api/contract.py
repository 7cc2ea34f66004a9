"""The idempotency contract over HTTP, for any server: a request with a key is performed once, and answered alike.

`Contract.answer` is given a request, who asks, and how to perform it. It answers with what was performed now, with what
was kept of the first time, or with a problem. One *effect* per key, not one execution: a handler that outlives its
lease may run beside its successor, but one answer is kept, and both get that one.

The handler runs in a task of its own. A client that gives up, or whose budget is spent, ends the waiting, never the
work: that is sealed or given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlencode

from ragfence.api import stored
from ragfence.api.keys import KEY_HEADER, budget_of, check_required, format_key, key_of, missing_key, parse_key
from ragfence.api.messages import Answer, Call
from ragfence.api.problems import Problem, Refused, problem_of, refusal, whole_seconds
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation
from ragfence.core.receipts import Decision, Flags, Receipt
from ragfence.engine.background import to_the_end
from ragfence.engine.claiming import Claimed, failed, is_final
from ragfence.errors import (
    Conflict,
    FencedOut,
    InFlight,
    RagfenceError,
    ResultTooBig,
    TerminalError,
)

if TYPE_CHECKING:
    from ragfence.fence import Fence

KIND = "http"
"""the kind of these operations; the policy may have rules for it under `kinds`"""
RETRY_AFTER_MS = 1000
"""how soon to ask again: a live lease is renewed, so its end says nothing"""

_log = logging.getLogger("ragfence.api")

Perform = Callable[[], Awaitable[Answer]]
Settled = Callable[[bool], None]


class Asked(NamedTuple):
    """A request that may be claimed."""

    call: Call
    key: str
    operation: Operation
    payload: object
    budget_s: float | None


def ignore(kept: bool) -> None:
    """For a handler that ends with its answer."""


class Contract:
    """`status_path`: where `status` is mounted; without one a 202 tells no address."""

    def __init__(self, fence: Fence, *, status_path: str = "") -> None:
        self._fence = fence
        self._policy = fence.policy
        self._status_path = status_path
        self._ttl_ms = fence.policy.for_kind(KIND).ttl_ms
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def answer(self, call: Call, principal: str, perform: Perform, settled: Settled = ignore) -> Answer:
        """The answer to a write.

        `perform` is called at most once, and only if this request won its key. `settled` is told afterwards whether
        its answer is the one that is given; if it raised there is nothing to tell. What `perform` raises gives the key
        back and is raised here; but a `TerminalError` of the user's own is an outcome: answered and kept as a problem.
        """
        try:
            asked = self._asked(call, principal)
        except Refused as refused:
            return refused.problem.answer()
        except RagfenceError as refused:
            return problem_of(refused).answer()
        if asked is None:
            answer = await perform()
            settled(True)
            return answer
        begun = asyncio.Event()
        task = asyncio.create_task(self._performed(asked, perform, settled, begun))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=asked.budget_s)
        except asyncio.CancelledError:
            task.add_done_callback(_nobody_waits)
            raise
        if not done:
            task.add_done_callback(_nobody_waits)
            return self._out_of_time(asked, begun=begun.is_set())
        return task.result()

    async def status(self, query: str, principal: str, *, root: str = "") -> Answer:
        """The address of a 202: 202 while the operation is performed, then its answer. `query` is the URL's."""
        try:
            operation, key = self._operation_asked_for(query, principal)
        except Refused as refused:
            return refused.problem.answer()
        except RagfenceError as refused:
            return problem_of(refused).answer()
        try:
            found = await to_the_end(self._look_up, operation)
        except RagfenceError as error:
            return problem_of(error, key=key).answer()
        if isinstance(found, Receipt):
            return self._replayed(found, key)
        if found:
            return self._accepted(operation, key, root)
        return refusal("VALIDATION.idempotency.key_unknown", key=key).answer(_told(key, "MISS"))

    async def finish(self) -> None:
        """Waits for what is still being performed for clients that are gone. For an orderly end of the server."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _asked(self, call: Call, principal: str) -> Asked | None:
        """None: the policy does not require a key, and there is none."""
        required = self._policy.require_headers
        check_required(call, required)
        budget_s = budget_of(call)
        key = key_of(call)
        if key is None:
            if any(name.lower() == KEY_HEADER for name in required):
                raise missing_key()
            return None
        operation = operation_of(key, principal, call.method, call.template)
        return Asked(call, key, operation, call.payload(), budget_s)

    async def _performed(self, asked: Asked, perform: Perform, settled: Settled, begun: asyncio.Event) -> Answer:
        raised: Exception | None = None
        own = False

        async def performing() -> Answer:
            nonlocal raised
            begun.set()
            try:
                return await perform()
            except Exception as error:
                raised = error
                raise

        try:
            answer, own = await self._claimed(asked, performing)
        except RagfenceError as error:
            if error is raised:  # the handler's own, not the claim's or the seal's
                raise
            answer = problem_of(error, key=asked.key).answer(_told(asked.key, ""))
        except BaseException:
            if begun.is_set() and raised is None:
                settled(False)
            raise
        # Last, with no pause before the task ends: whoever finds it ended finds it settled, and the other way round.
        if begun.is_set() and raised is None:
            settled(own)
        return answer

    async def _claimed(self, asked: Asked, perform: Perform) -> tuple[Answer, bool]:
        """The answer, and whether it is the one that was performed for this request."""
        async with self._claim(asked) as op:
            if op.error is not None:
                return self._refused(asked, op.error), False
            if not op.is_new:
                return self._replayed(op.receipt, asked.key), False
            answer = await self._answer_of(perform)
            told = _told(asked.key, "MISS")
            if stored.is_kept(answer.status):
                try:
                    receipt = await to_the_end(self._seal, op, answer)
                except FencedOut as lost:
                    winner: Receipt | None = lost.receipt
                    if winner is None:  # another attempt took over, and has no outcome yet
                        return self._in_progress(asked), False
                    return self._replayed(winner, asked.key), False
                told |= {"idempotency-status": "stored"} | self._expiry(receipt)
            return stored.whole(answer).with_headers(told), True

    def _seal(self, op: Claimed, answer: Answer) -> Receipt:
        if answer.complete and len(answer.body) <= self._policy.http.max_stored_bytes:
            with contextlib.suppress(ResultTooBig):
                return op.seal(result=stored.to_result(answer))
        # It happened, and must not happen again: better an outcome without its body than none.
        return op.seal(result=stored.without_body(answer))

    def _claim(self, asked: Asked) -> Claimed:
        wait_s = self._policy.http.wait_s
        return self._fence.claim(
            asked.operation,
            payload=asked.payload,
            wait_s=wait_s if asked.budget_s is None else min(wait_s, asked.budget_s),
            verdict=True,
            route=asked.operation.action,
            correlation_id=_plain(asked.call.header("x-correlation-id") or asked.call.header("x-request-id")),
        )

    async def _answer_of(self, perform: Perform) -> Answer:
        try:
            return await perform()
        except TerminalError as error:
            if not is_final(error):
                raise
            # Kept as the answer it is, so that the first call and its replays get the same bytes.
            problem = problem_of(error)
            return replace(problem, detail=self._policy.redactor.redact_text(problem.detail)).answer()

    def _refused(self, asked: Asked, error: RagfenceError) -> Answer:
        key, call = asked.key, asked.call
        if isinstance(error, Conflict):
            problem = Problem(
                status=self._policy.on_conflict.status,
                code=error.code,
                title="The key was used before, for another request",
                retryable=False,
                detail=f"Idempotency-Key {key!r} was used before on {call.method} {call.template}, for another request",
                hint="use a new key for another request, or send what was sent first",
                extras={"key": key, "diff": _of_the_body(error.diff), "differs": _parts(error.diff)},
            )
            return problem.answer(_told(key, "CONFLICT"))
        if isinstance(error, InFlight):
            return self._in_progress(asked)
        return problem_of(error, key=key).answer(_told(key, "IN_PROGRESS"))

    def _in_progress(self, asked: Asked) -> Answer:
        key = asked.key
        if self._policy.http.in_progress == 202:
            return self._accepted(asked.operation, key, asked.call.root)
        busy = InFlight(
            f"a request with Idempotency-Key {key!r} is being performed",
            hint="wait, then send it again with the same key",
            key=key,
            retry_after_ms=RETRY_AFTER_MS,
        )
        return problem_of(busy).answer(_told(key, "IN_PROGRESS"))

    def _accepted(self, operation: Operation, key: str, root: str) -> Answer:
        told: dict[str, Any] = {"key": key, "state": "in_progress", "retry_after": whole_seconds(RETRY_AFTER_MS)}
        headers = {"retry-after": str(told["retry_after"]), "cache-control": "no-store"}
        if self._status_path:
            method, _, template = operation.action.partition(" ")
            query = urlencode({"key": key, "method": method, "route": template})
            told["status_url"] = headers["location"] = f"{root}{self._status_path}?{query}"
        body = json.dumps(told, separators=(",", ":")).encode()
        answer = stored.whole(Answer(202, (("content-type", "application/json"),), body))
        return answer.with_headers(headers | _told(key, "IN_PROGRESS"))

    def _out_of_time(self, asked: Asked, *, begun: bool) -> Answer:
        # Not begun: the store has not said yet whether there is a claim, and the address of a 202 would know nothing.
        if begun and self._policy.http.in_progress == 202:
            return self._accepted(asked.operation, asked.key, asked.call.root)
        late = refusal(
            "DEPENDENCY.timeout",
            f"not done within {asked.budget_s:g} s; it goes on",
            key=asked.key,
            retry_after=whole_seconds(RETRY_AFTER_MS),
        )
        return late.answer(_told(asked.key, "IN_PROGRESS"))

    def _replayed(self, receipt: Receipt, key: str) -> Answer:
        told = _told(key, "HIT") | {"idempotency-status": "replayed"} | self._expiry(receipt)
        if receipt.failed:  # sealed by other means than an answer
            return problem_of(failed(receipt), key=key).answer(told)
        return stored.from_result(receipt.result, key).with_headers(told)

    def _expiry(self, receipt: Receipt) -> dict[str, str]:
        if not self._ttl_ms or not receipt.sealed_at_ms:
            return {}
        return {"idempotency-expires": formatdate((receipt.sealed_at_ms + self._ttl_ms) / 1000, usegmt=True)}

    def _operation_asked_for(self, query: str, principal: str) -> tuple[Operation, str]:
        given = parse_qs(query, max_num_fields=8) if query.count("&") < 8 else {}
        key, method, route = (given.get(name, [""])[0] for name in ("key", "method", "route"))
        if not key or not method or not route:
            raise Refused(refusal("VALIDATION.idempotency.key_unknown", "the address is not one a 202 told"))
        key = parse_key(format_key(key))
        return operation_of(key, principal, method, route), key

    def _look_up(self, operation: Operation) -> Receipt | bool:
        """The outcome, or whether it is being performed. Only looks: it claims nothing and leaves no row."""
        engine = self._fence._engine  # the facade has nothing for looking at single records
        request = engine.request(operation, None)
        (held,) = engine.fences.read([request.lookup])
        record = held.record
        if record is not None and record.ended:
            return engine.performer.results.receipt(request.key, record, Decision.DUPLICATE, Flags())
        return record is not None and record.held_at(engine.fences.now_ms())


def operation_of(key: str, principal: str, method: str, template: str) -> Operation:
    """The scope of a key: the tenant (of the fence), who asks, the method and the route."""
    action = f"{method} {template}"
    if len(action) > 512 or not action.isprintable() or not action.isascii():
        action = f"{method} {digest('ragfence/http-route/1', template.encode('utf-8', 'replace')).hex()}"
    return Operation(kind=KIND, source_type=principal, source_id=key, action=action)


def _told(key: str, status: str) -> dict[str, str]:
    told = {"x-idempotency-key": format_key(key)}
    return told | {"x-idempotency-status": status} if status else told


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


def _plain(text: str) -> str:
    return text if len(text) <= 255 and text.isascii() and text.isprintable() else ""


def _nobody_waits(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a request failed after its client had stopped waiting", exc_info=error)
