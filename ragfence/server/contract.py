"""The idempotency contract over HTTP, for any server: a request with a key is executed once.

`Contract.answer` takes a request, its caller, and a function that executes it. It returns the answer of that function,
the stored answer of the first time, or a problem. One *effect* per key, not one execution: a handler that outlives its
lease may run alongside its successor, but only one answer is stored, and both requests get that one.

Requests that arrive together claim together, in one call to the store; see `engine.aio`. A replay is then answered
directly. A handler runs in a task of its own: a client that disconnects, or whose budget has expired, ends the waiting,
never the work, which is sealed or whose key is released. A client that disconnects before the store has answered has
claimed nothing.
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
from ragfence.engine.aio import run_blocking
from ragfence.engine.claim_block import ClaimBlock, is_final
from ragfence.errors import FencedOut, RagfenceError, ResultTooBig, TerminalError
from ragfence.server.replay import KIND, RequestReader, operation_of, stored_key
from ragfence.server.responses import (
    ContractResponses,
    HttpClaim,
    is_stored,
    key_headers,
    to_result,
    with_length,
    without_body,
)
from ragfence.server.streams import AnswerStream, Produce, Streamed
from ragfence.wire.headers import format_key, parse_key
from ragfence.wire.messages import Answer, Call
from ragfence.wire.problems import RequestRefused, problem_of, refusal

if TYPE_CHECKING:
    from ragfence.fence import Fence

_log = logging.getLogger("ragfence.server")

Perform = Callable[[], Awaitable[Answer]]
OnSettled = Callable[[bool], None]
"""Called once the answer is decided: with True if it is the one that `Perform` returned."""


def ignore(own: bool) -> None:
    """For a handler that does nothing after its answer."""


class Handler:
    """Executes a request once, and records how far it is."""

    __slots__ = ("_on_settled", "_perform", "is_running", "limit", "raised")

    def __init__(self, perform: Perform, on_settled: OnSettled, limit: int) -> None:
        """`limit`: bytes of its answer that are stored."""
        self._perform = perform
        self.limit = limit
        self._on_settled = on_settled
        self.is_running = False
        self.raised: Exception | None = None

    async def __call__(self) -> Answer:
        self.is_running = True
        try:
            return await self._perform()
        except Exception as error:
            self.raised = error
            raise

    def settle(self, own: bool) -> None:
        """Does nothing for a handler that raised, or was never called."""
        if self.is_running and self.raised is None:
            self._on_settled(own)


class StartedRequest(NamedTuple):
    """A request whose claim is on its way: `Contract.execute` leads to its answer, `block.discard` releases it."""

    claim: HttpClaim
    block: ClaimBlock


class Contract:
    """The contract for the requests of one tenant.

    Args:
        fence: The fence that claims and seals.
        status_path: Where `status` is mounted; without one a 202 has no Location.
        repeatable: Handlers have fences of their own, so an outage of a store does not use up attempts of a key.
    """

    def __init__(self, fence: Fence, *, status_path: str = "", repeatable: bool = False) -> None:
        self._claims = fence.batched_claims()
        self._inspector = fence.inspector
        self._policy = fence.policy
        self._repeatable = repeatable
        self.reader = RequestReader(self._claims, fence.policy)
        self._responses = ContractResponses(fence.policy, fence.policy.for_kind(KIND).ttl_ms, status_path)
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._abandoned: set[asyncio.Task[Answer]] = set()

    async def answer(self, call: Call, principal: str, perform: Perform, on_settled: OnSettled = ignore) -> Answer:
        """Returns the answer to a write.

        Args:
            call: The request.
            principal: The caller, who is part of the key's scope.
            perform: Executes the request. Called at most once, and only if this request won its key. An error that it
                raises releases the key and is raised here; but a `TerminalError` of the application is an outcome,
                answered and stored as a problem.
            on_settled: Called afterwards with whether the answer of `perform` is the one that is returned; not called
                if `perform` raised.
        """
        started = await self.start(self.reader.checked(call, principal))
        return started if isinstance(started, Answer) else await self.execute(started, perform, on_settled)

    def content_key(self) -> ContentKey | None:
        """Returns the key of content digests, if the tenant has one: a route keys the digests it compares as well."""
        return self._claims.content_key()

    async def start(self, claim: HttpClaim | Answer | None) -> StartedRequest | Answer | None:
        """Claims the key. Returns the answer if it is known already, as for most retries.

        Returns None for a request without a key. An answer (of a request that was refused) is returned as it is.
        """
        if not isinstance(claim, HttpClaim):
            return claim
        try:
            block = self._block(claim)
            # In the caller's task: a replay needs no other.
            if (replayed := await block.try_replay(claim.budget_s)) is not None:
                return self._responses.replay(claim, replayed)
        except RagfenceError as error:
            return problem_of(error, key=claim.key).answer(key_headers(claim.key, ""))
        return StartedRequest(claim, block)

    async def execute(self, started: StartedRequest | None, perform: Perform, on_settled: OnSettled = ignore) -> Answer:
        """Returns the answer to what `start` returned; see `answer`."""
        handler = Handler(perform, on_settled, self._policy.http.max_stored_bytes)
        if started is None:
            return await _unfenced(handler)
        task = self._start_task(started, handler)
        return await self._wait(started.claim, handler, task, set()) or task.result()

    async def stream(
        self, call: Call, principal: str, head: Answer, produce: Produce, *, limit: int
    ) -> Answer | Streamed:
        """Returns the answer to a write whose body is sent piece by piece, while it is made.

        Pieces that `produce` writes are sent at once. The last piece, which it returns, is sent after the answer is
        sealed: a client that has received it will get the same bytes again. A stream without its last piece was cut
        off. An error that `produce` raises before its first piece is raised here. Replays and refusals are answered as
        for any write.

        Args:
            call: The request.
            principal: The caller.
            head: Status and headers of the answer.
            produce: Writes the pieces.
            limit: Bytes of the answer that are stored.
        """
        claim = self.reader.checked(call, principal)
        if isinstance(claim, Answer):
            return claim
        stream = AnswerStream(head, produce, limit=limit)
        handler = Handler(stream.perform, stream.settle, limit)
        if claim is None:
            task = self._task(_unfenced(handler))
        else:
            started = await self.start(claim)
            if not isinstance(started, StartedRequest):
                assert started is not None  # it has a key
                return started
            task = self._start_task(started, handler)
        task.add_done_callback(lambda _: stream.end())
        if late := await self._wait(claim, handler, task, {stream.started}):
            return late
        if not stream.started.done():
            return task.result()
        task.add_done_callback(_log_failure)
        headers = key_headers(claim.key, "MISS") | {"idempotency-status": "stored"} if claim else {}
        return Streamed(head.status, head.with_headers(headers).headers, stream.pieces(claim and claim.give_up_at))

    async def status(self, query: str, principal: str, *, root: str = "") -> Answer:
        """Answers a request to the Location of a 202: 202 while the operation is being executed, then its answer."""
        try:
            operation, key = self._operation_in(query, principal)
        except RequestRefused as refused:
            return refused.problem.answer()
        except RagfenceError as refused:
            return problem_of(refused).answer()
        try:
            found = await run_blocking(self._look_up, operation)
        except RagfenceError as error:
            return problem_of(error, key=key).answer()
        if isinstance(found, Receipt):
            return self._responses.replayed(found, key)
        if found:
            return self._responses.accepted(operation, key, root)
        return refusal("VALIDATION.idempotency.key_unknown", key=key).answer(key_headers(key, "MISS"))

    async def is_known(self, call: Call, principal: str) -> bool:
        """Returns whether a write has an outcome, is being executed, or is refused. Claims nothing."""
        claim = self.reader.checked(call, principal)
        return not isinstance(claim, HttpClaim) or bool(await run_blocking(self._look_up, claim.request.operation))

    @property
    def abandoned(self) -> int:
        """The number of requests being executed for clients that have disconnected or stopped waiting."""
        return len(self._abandoned)

    async def finish(self) -> None:
        """Waits for all requests that are being executed, also those of clients that have disconnected."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start_task(self, started: StartedRequest, handler: Handler) -> asyncio.Task[Answer]:
        task = self._task(self._run(started.claim, started.block, handler))
        # A task that was cancelled before its first step has not entered the block.
        task.add_done_callback(lambda _: started.block.discard())
        return task

    def _task(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait(
        self,
        claim: HttpClaim | None,
        handler: Handler,
        task: asyncio.Task[Answer],
        others: set[asyncio.Future[None]],
    ) -> Answer | None:
        """Waits for the task, or one of the others. Returns an answer only if the time of the client expires first."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not ended.done():
                ended.set_result(None)

        # Not `asyncio.wait`, which costs several times as much: every request that is executed waits here.
        task.add_done_callback(wake)
        for other in others:
            other.add_done_callback(wake)
        timer = loop.call_at(claim.give_up_at, wake) if claim is not None and claim.give_up_at is not None else None
        try:
            await ended
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if claim is None or task.done() or any(other.done() for other in others):
            return None
        self._abandon(task)
        return self._responses.out_of_time(claim, is_running=handler.is_running)

    def _abandon(self, task: asyncio.Task[Answer]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        task.add_done_callback(_log_failure)

    async def _run(self, claim: HttpClaim, block: ClaimBlock, handler: Handler) -> Answer:
        own = False
        try:
            answer, own = await self._run_block(claim, block, handler)
        except RagfenceError as error:
            if error is handler.raised:  # its own, not the claim's or the seal's
                raise
            answer = problem_of(error, key=claim.key).answer(key_headers(claim.key, ""))
        except BaseException:
            handler.settle(False)
            raise
        # Last, without an await before the task ends: a task that has ended is settled, and the other way round.
        handler.settle(own)
        return answer

    async def _run_block(self, claim: HttpClaim, block: ClaimBlock, handler: Handler) -> tuple[Answer, bool]:
        """Returns the answer, and whether it is the one that the handler of this request made."""
        async with block:
            if block.error is not None:
                return self._responses.refused(claim, block.error), False
            if not block.is_new:
                return self._responses.replayed(block.receipt, claim.key), False
            answer = await self._answer_of(handler)
            headers = key_headers(claim.key, "MISS")
            if is_stored(answer.status):
                try:
                    receipt = await run_blocking(_seal, block, answer, handler.limit)
                except FencedOut as lost:
                    winner: Receipt | None = lost.receipt
                    if winner is None:  # another attempt took over and has no outcome yet
                        return self._responses.in_progress(claim), False
                    return self._responses.replayed(winner, claim.key), False
                headers |= {"idempotency-status": "stored"} | self._responses.expiry(receipt)
            else:
                block.failure = answer.error
            return with_length(answer).with_headers(headers), True

    def _block(self, claim: HttpClaim) -> ClaimBlock:
        wait_s = self._policy.http.wait_s
        if claim.budget_s is not None:
            wait_s = min(wait_s, claim.budget_s)
        return self._claims.block(claim.request, wait_ms=int(wait_s * 1000), repeatable=self._repeatable)

    async def _answer_of(self, perform: Perform) -> Answer:
        try:
            return await perform()
        except TerminalError as error:
            if not is_final(error):
                raise
            # Stored as an answer, so that the first call and its replays get the same bytes.
            return problem_of(error).redacted(self._policy.redactor).answer()

    def _operation_in(self, query: str, principal: str) -> tuple[Operation, str]:
        given = parse_qs(query, max_num_fields=8) if query.count("&") < 8 else {}
        key, method, route = (given.get(name, [""])[0] for name in ("key", "method", "route"))
        if not key or not method or not route:
            raise RequestRefused(
                refusal("VALIDATION.idempotency.key_unknown", "the address is not the Location of a 202")
            )
        key = parse_key(format_key(key))
        stored_as = stored_key(key, self.content_key())
        return operation_of(stored_as, principal, method, route, self._claims.tenant), key

    def _look_up(self, operation: Operation) -> Receipt | bool:
        """Returns the outcome, or whether the operation is being executed. Claims nothing and writes no row."""
        record = self._inspector.record(operation)
        if record is not None and record.ended:
            return self._inspector.receipt(operation, record)
        return record is not None and record.held_at(self._inspector.now_ms())


def _seal(block: ClaimBlock, answer: Answer, limit: int) -> Receipt:
    if answer.complete and len(answer.body) <= limit:
        with contextlib.suppress(ResultTooBig):
            return block.seal(result=to_result(answer))
    # The effect happened and must not be repeated: an outcome without its body is better than none.
    return block.seal(result=without_body(answer))


async def _unfenced(handler: Handler) -> Answer:
    answer = await handler()
    handler.settle(True)
    return answer


def _log_failure(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a request failed after its client had stopped waiting", exc_info=error)
