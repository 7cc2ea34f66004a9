"""The idempotency contract over HTTP, for any server: a request with a key is performed once, and answered alike.

`Contract.answer` is given a request, who asks, and how to perform it. It answers with what was performed now, with what
was kept of the first time, or with a problem. One *effect* per key, not one execution: a handler that outlives its
lease may run beside its successor, but one answer is kept, and both get that one.

Requests that arrive together ask the store together; see `engine.aio`. A replay is then answered on the spot. A
handler runs in a task of its own: a client that gives up, or whose budget is spent, ends the waiting, never the work,
which is sealed or given back. One that gives up before the store has answered has claimed nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

from ragfence.core.hashing import ContentKey
from ragfence.core.operations import Operation
from ragfence.core.receipts import Receipt
from ragfence.engine.aio import to_the_end
from ragfence.engine.claim_block import ClaimBlock, is_final
from ragfence.errors import FencedOut, RagfenceError, ResultTooBig, TerminalError
from ragfence.server import stored_response
from ragfence.server.http_claims import KIND, RequestReader, operation_of, stored_key
from ragfence.server.responses import ContractResponses, HttpClaim, told_of
from ragfence.server.streams import Outflow, Produce, Streamed
from ragfence.wire.headers import format_key, parse_key
from ragfence.wire.messages import Answer, Call
from ragfence.wire.problems import RequestRefused, problem_of, refusal

if TYPE_CHECKING:
    from ragfence.fence import Fence

SMALL_ANSWER = 64 << 10
"""bytes: to make a result of them holds up nobody"""

_log = logging.getLogger("ragfence.server")

Perform = Callable[[], Awaitable[Answer]]
Settled = Callable[[bool], None]


def ignore(kept: bool) -> None:
    """For a handler that ends with its answer."""


class Handler:
    """What performs a request, and how far it is."""

    __slots__ = ("_perform", "_settled", "begun", "limit", "raised")

    def __init__(self, perform: Perform, settled: Settled, limit: int) -> None:
        """`limit`: of what is kept of its answer."""
        self._perform = perform
        self.limit = limit
        self._settled = settled
        self.begun = False
        self.raised: Exception | None = None

    async def __call__(self) -> Answer:
        self.begun = True
        try:
            return await self._perform()
        except Exception as error:
            self.raised = error
            raise

    def settle(self, kept: bool) -> None:
        """If it raised there is nothing to tell, and if it has not begun nobody to be told."""
        if self.begun and self.raised is None:
            self._settled(kept)


class StartedRequest(NamedTuple):
    """A request that has asked for its key: it goes on to its answer by `Contract.go_on`, or ends by `op.let_go`."""

    asked: HttpClaim
    op: ClaimBlock


class Contract:
    """`status_path`: where `status` is mounted; without one a 202 tells no address.

    `repeatable`: what is performed has fences of its own, so an outage of a store does not use up a key's attempts.
    """

    def __init__(self, fence: Fence, *, status_path: str = "", repeatable: bool = False) -> None:
        self._claims = fence.batched_claims()
        self._inspector = fence.inspector
        self._policy = fence.policy
        self._repeatable = repeatable
        self.reading = RequestReader(self._claims, fence.policy)
        self._telling = ContractResponses(fence.policy, fence.policy.for_kind(KIND).ttl_ms, status_path)
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._left: set[asyncio.Task[Answer]] = set()

    async def answer(self, call: Call, principal: str, perform: Perform, settled: Settled = ignore) -> Answer:
        """The answer to a write.

        `perform` is called at most once, and only if this request won its key. `settled` is told afterwards whether
        its answer is the one that is given; if it raised there is nothing to tell. What `perform` raises gives the key
        back and is raised here; but a `TerminalError` of the user's own is an outcome: answered and kept as a problem.
        """
        begun = await self.begin(self.reading.checked(call, principal))
        return begun if isinstance(begun, Answer) else await self.go_on(begun, perform, settled)

    def content_key(self) -> ContentKey | None:
        """Of a tenant whose digests of content are keyed: a route that compares digests of its own keys them too."""
        return self._claims.content_key()

    async def begin(self, asked: HttpClaim | Answer | None) -> StartedRequest | Answer | None:
        """Asks for the key of what was read. The answer, if it is known already, as that of most retries is."""
        if not isinstance(asked, HttpClaim):
            return asked
        try:
            op = self._claim(asked)
            # In the caller's own task: a replay needs no other.
            if (replayed := await op.ask(asked.budget_s)) is not None:
                return self._telling.replay(asked, replayed)
        except RagfenceError as error:
            return problem_of(error, key=asked.key).answer(told_of(asked.key, ""))
        return StartedRequest(asked, op)

    async def go_on(self, begun: StartedRequest | None, perform: Perform, settled: Settled = ignore) -> Answer:
        """The answer to what was begun; see `answer`. None: a request without a key, which the policy allows."""
        handler = Handler(perform, settled, self._policy.http.max_stored_bytes)
        if begun is None:
            return await _unfenced(handler)
        task = self._performing(begun, handler)
        return await self._waited(begun.asked, handler, task, set()) or task.result()

    async def stream(
        self, call: Call, principal: str, head: Answer, produce: Produce, *, limit: int
    ) -> Answer | Streamed:
        """The answer to a write whose body is made piece by piece, and sent while it is made.

        `head` has status and headers. What `produce` writes is sent at once; the last piece, which it returns, only
        after the whole is sealed (up to `limit` bytes of it): whoever has it will get the same bytes again. A stream
        that ends without it was cut off. What `produce` raises before its first piece is raised here. Replays and
        refusals are answers as of any write.
        """
        asked = self.reading.checked(call, principal)
        if isinstance(asked, Answer):
            return asked
        flow = Outflow(head, produce, limit=limit)
        handler = Handler(flow.perform, flow.settle, limit)
        if asked is None:
            task = self._task(_unfenced(handler))
        else:
            begun = await self.begin(asked)
            if not isinstance(begun, StartedRequest):
                assert begun is not None  # it has a key
                return begun
            task = self._performing(begun, handler)
        task.add_done_callback(lambda _: flow.end())
        if late := await self._waited(asked, handler, task, {flow.begun}):
            return late
        if not flow.begun.done():
            return task.result()
        task.add_done_callback(_nobody_waits)
        told = told_of(asked.key, "MISS") | {"idempotency-status": "stored"} if asked else {}
        return Streamed(head.status, head.with_headers(told).headers, flow.pieces(asked and asked.give_up_at))

    async def status(self, query: str, principal: str, *, root: str = "") -> Answer:
        """The address of a 202: 202 while the operation is performed, then its answer. `query` is the URL's."""
        try:
            operation, key = self._operation_asked_for(query, principal)
        except RequestRefused as refused:
            return refused.problem.answer()
        except RagfenceError as refused:
            return problem_of(refused).answer()
        try:
            found = await to_the_end(self._look_up, operation)
        except RagfenceError as error:
            return problem_of(error, key=key).answer()
        if isinstance(found, Receipt):
            return self._telling.replayed(found, key)
        if found:
            return self._telling.accepted(operation, key, root)
        return refusal("VALIDATION.idempotency.key_unknown", key=key).answer(told_of(key, "MISS"))

    async def is_known(self, call: Call, principal: str) -> bool:
        """Whether a write has an outcome, is being performed, or is refused. Claims nothing."""
        asked = self.reading.checked(call, principal)
        return not isinstance(asked, HttpClaim) or bool(await to_the_end(self._look_up, asked.request.operation))

    @property
    def left_behind(self) -> int:
        """How much is being performed for clients that have left, or stopped waiting."""
        return len(self._left)

    async def finish(self) -> None:
        """Waits for what is still being performed for clients that are gone. For an orderly end of the server."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _performing(self, begun: StartedRequest, handler: Handler) -> asyncio.Task[Answer]:
        task = self._task(self._performed(begun.asked, begun.op, handler))
        # A task that was cancelled before its first step has entered nothing.
        task.add_done_callback(lambda _: begun.op.let_go())
        return task

    def _task(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _waited(
        self,
        asked: HttpClaim | None,
        handler: Handler,
        task: asyncio.Task[Answer],
        others: set[asyncio.Future[None]],
    ) -> Answer | None:
        """Until the task has ended, or one of the others. What the client is told whose time is over before that."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not over.done():
                over.set_result(None)

        # By hand: `asyncio.wait` costs several times as much, and every request that is performed waits here.
        task.add_done_callback(wake)
        for other in others:
            other.add_done_callback(wake)
        timer = loop.call_at(asked.give_up_at, wake) if asked is not None and asked.give_up_at is not None else None
        try:
            await over
        except asyncio.CancelledError:
            self._leave(task)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if asked is None or task.done() or any(other.done() for other in others):
            return None
        self._leave(task)
        return self._telling.out_of_time(asked, begun=handler.begun)

    def _leave(self, task: asyncio.Task[Answer]) -> None:
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        task.add_done_callback(_nobody_waits)

    async def _performed(self, asked: HttpClaim, op: ClaimBlock, handler: Handler) -> Answer:
        own = False
        try:
            answer, own = await self._claimed(asked, op, handler)
        except RagfenceError as error:
            if error is handler.raised:  # its own, not the claim's or the seal's
                raise
            answer = problem_of(error, key=asked.key).answer(told_of(asked.key, ""))
        except BaseException:
            handler.settle(False)
            raise
        # Last, with no pause before the task ends: whoever finds it ended finds it settled, and the other way round.
        handler.settle(own)
        return answer

    async def _claimed(self, asked: HttpClaim, op: ClaimBlock, handler: Handler) -> tuple[Answer, bool]:
        """The answer, and whether it is the one that was performed for this request."""
        async with op:
            if op.error is not None:
                return self._telling.refused(asked, op.error), False
            if not op.is_new:
                return self._telling.replayed(op.receipt, asked.key), False
            answer = await self._answer_of(handler)
            told = told_of(asked.key, "MISS")
            if stored_response.is_kept(answer.status):
                try:
                    receipt = await _sealed(op, answer, handler.limit)
                except FencedOut as lost:
                    winner: Receipt | None = lost.receipt
                    if winner is None:  # another attempt took over, and has no outcome yet
                        return self._telling.in_progress(asked), False
                    return self._telling.replayed(winner, asked.key), False
                told |= {"idempotency-status": "stored"} | self._telling.expiry(receipt)
            else:
                op.failure = answer.error
            return stored_response.whole(answer).with_headers(told), True

    def _claim(self, asked: HttpClaim) -> ClaimBlock:
        wait_s = self._policy.http.wait_s
        if asked.budget_s is not None:
            wait_s = min(wait_s, asked.budget_s)
        return self._claims.block(asked.request, wait_ms=int(wait_s * 1000), repeatable=self._repeatable)

    async def _answer_of(self, perform: Perform) -> Answer:
        try:
            return await perform()
        except TerminalError as error:
            if not is_final(error):
                raise
            # Kept as the answer it is, so that the first call and its replays get the same bytes.
            return problem_of(error).redacted(self._policy.redactor).answer()

    def _operation_asked_for(self, query: str, principal: str) -> tuple[Operation, str]:
        given = parse_qs(query, max_num_fields=8) if query.count("&") < 8 else {}
        key, method, route = (given.get(name, [""])[0] for name in ("key", "method", "route"))
        if not key or not method or not route:
            raise RequestRefused(refusal("VALIDATION.idempotency.key_unknown", "the address is not one a 202 told"))
        key = parse_key(format_key(key))
        stored_as = stored_key(key, self.content_key())
        return operation_of(stored_as, principal, method, route, self._claims.tenant), key

    def _look_up(self, operation: Operation) -> Receipt | bool:
        """The outcome, or whether it is being performed. Only looks: it claims nothing and leaves no row."""
        record = self._inspector.record(operation)
        if record is not None and record.ended:
            return self._inspector.receipt(operation, record)
        return record is not None and record.held_at(self._inspector.now_ms())


async def _sealed(op: ClaimBlock, answer: Answer, limit: int) -> Receipt:
    if answer.complete and len(answer.body) <= min(limit, SMALL_ANSWER):
        with contextlib.suppress(ResultTooBig):
            if (receipt := await op.seal_soon(result=stored_response.to_result(answer))) is not None:
                return receipt
    return await to_the_end(_seal, op, answer, limit)


def _seal(op: ClaimBlock, answer: Answer, limit: int) -> Receipt:
    if answer.complete and len(answer.body) <= limit:
        with contextlib.suppress(ResultTooBig):
            return op.seal(result=stored_response.to_result(answer))
    # It happened, and must not happen again: better an outcome without its body than none.
    return op.seal(result=stored_response.without_body(answer))


async def _unfenced(handler: Handler) -> Answer:
    answer = await handler()
    handler.settle(True)
    return answer


def _nobody_waits(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a request failed after its client had stopped waiting", exc_info=error)
