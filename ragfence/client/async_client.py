"""`AsyncClient`: executes the steps of every call, and awaits. It has the methods of `Client`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload

from ragfence.client import batches, calls
from ragfence.client.batches import BATCH, MAX_BATCH_BYTES, WAIT_S, ClientBatches, Documents
from ragfence.client.calls import ClientCalls
from ragfence.client.retry import RetryPolicy
from ragfence.client.session import TIMEOUT_S, ClientSession, closed_error, make_calls
from ragfence.client.steps import END, Give, Lost, OnAttempt, Pause, Pull, Reply, Send, Steps
from ragfence.core.receipts import OnError, Receipt
from ragfence.errors import RagfenceError

if TYPE_CHECKING:
    import httpx

P = ParamSpec("P")
T = TypeVar("T")


def _run(
    call: Callable[Concatenate[ClientCalls, P], Steps[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(call)
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(call(client._core, *args, **kwargs))

    return method


def _iterate(
    call: Callable[Concatenate[ClientCalls, P], Steps[None]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[dict[str, Any]]]:
    @wraps(call)
    def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[dict[str, Any]]:
        return client._iterate(call(client._core, *args, **kwargs))

    return method


class AsyncClient:
    """Like `Client`, for one event loop: `await client.ingest(...)`, `async for row in client.decisions()`.

    >>> async with AsyncClient("https://ingest.example") as client:  # doctest: +SKIP
    ...     await client.ingest(ragfence.Document("a", "some text"))
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        retry: RetryPolicy | None = None,
        run: str | None = None,
        allow_http: bool | None = None,
        on_attempt: OnAttempt | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._core = make_calls(url, api_key, timeout_s, retry, run, clock, on_attempt)
        self._session = ClientSession(self._core, allow_http=allow_http)
        self._sleep = sleep
        self._http: httpx.AsyncClient = self._session.httpx.AsyncClient(**self._session.options(transport))

    ingest = _run(calls.ingest)
    put = _run(calls.put)
    retract = _run(calls.retract)
    get = _run(calls.get)
    snippets = _run(calls.snippets)
    receipt = _run(calls.receipt)
    build = _run(calls.build)
    builds = _run(calls.builds)
    swap = _run(calls.swap)
    rollback = _run(calls.rollback)
    resolve = _run(calls.resolve)
    aliases = _run(calls.aliases)
    history = _run(calls.history)
    search = _run(calls.search)
    decisions = _iterate(calls.decisions)
    keys = _iterate(calls.keys)
    stats = _run(calls.stats)
    release = _run(calls.release)
    purge = _run(calls.purge)
    purge_expired = _run(calls.purge_expired)

    @overload
    def ingest_many(
        self,
        documents: Documents,
        *,
        progress: bool | Callable[[int], None] = ...,
        batch: int = ...,
        max_batch_bytes: int = ...,
        wait_s: float = ...,
        stream: Literal[False] = ...,
        on_error: OnError = ...,
    ) -> Awaitable[list[Receipt]]: ...
    @overload
    def ingest_many(
        self,
        documents: Documents,
        *,
        progress: bool | Callable[[int], None] = ...,
        batch: int = ...,
        max_batch_bytes: int = ...,
        wait_s: float = ...,
        stream: Literal[True],
        on_error: OnError = ...,
    ) -> AsyncIterator[Receipt]: ...
    def ingest_many(
        self,
        documents: Documents,
        *,
        progress: bool | Callable[[int], None] = False,
        batch: int = BATCH,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        wait_s: float = WAIT_S,
        stream: bool = False,
        on_error: OnError = "return",
    ) -> Awaitable[list[Receipt]] | AsyncIterator[Receipt]:
        """Like `Client.ingest_many`; the documents may also come from an asynchronous iterable."""
        batching = ClientBatches(progress, batch, max_batch_bytes, wait_s, on_error)
        receipts = self._iterate(batches.ingest_many(self._core, documents, batching))
        return receipts if stream else _all(receipts)

    async def load(
        self,
        loader: object,
        *,
        doc_id: Callable[[Any], str] | None = None,
        progress: bool | Callable[[int], None] = False,
        batch: int = BATCH,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        wait_s: float = WAIT_S,
        on_error: OnError = "return",
    ) -> list[Receipt]:
        """Like `Client.load`. The loader is read in this thread."""
        batching = ClientBatches(progress, batch, max_batch_bytes, wait_s, on_error)
        return await _all(self._iterate(batches.load(self._core, loader, batching, doc_id=doc_id)))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._core.settings.url!r})"

    async def _run(self, steps: Steps[T]) -> T:
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            outcome = await self._execute(step)

    async def _iterate(self, steps: Steps[None]) -> AsyncGenerator[Any, None]:
        outcome: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration:
                    return
                if isinstance(step, Give):
                    yield step.value
                    outcome = None
                else:
                    outcome = await self._execute(step)

    async def _execute(self, step: Send | Pause | Pull | Give) -> Any:
        match step:
            case Send():
                return await self._send(step)
            case Pause(seconds):
                return await self._sleep(seconds)
            case Pull(source):
                return next(source, END) if isinstance(source, Iterator) else await anext(source, END)
        raise AssertionError(step)

    async def _send(self, send: Send) -> Reply | Lost:
        if self._http.is_closed:
            raise closed_error()
        httpx, until = self._session.httpx, time.monotonic() + send.whole_s
        try:
            async with self._http.stream(**self._session.arguments(send)) as response:
                parts = []
                async for part in response.aiter_bytes():
                    if time.monotonic() > until:
                        return self._session.timed_out(send)
                    parts.append(part)
                return Reply(response.status_code, response.headers, b"".join(parts))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return self._session.lost(error)


async def _all(receipts: AsyncGenerator[Receipt, None]) -> list[Receipt]:
    """Like `collect`, for an asynchronous generator."""
    collected: list[Receipt] = []
    try:
        async for receipt in receipts:
            collected.append(receipt)  # noqa: PERF401  # those before an error are kept
    except RagfenceError as stopped:
        if "position" in stopped.details:
            stopped.details["receipts"] = tuple(collected)
        raise
    return collected
