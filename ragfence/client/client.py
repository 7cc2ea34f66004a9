"""`Client`: executes the steps of every call, and blocks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload

from ragfence.client import batches, calls
from ragfence.client.batches import BATCH, MAX_BATCH_BYTES, WAIT_S, ClientBatches
from ragfence.client.calls import ClientCalls
from ragfence.client.retry import RetryPolicy
from ragfence.client.session import TIMEOUT_S, ClientSession, closed_error, make_calls
from ragfence.client.steps import END, Give, Lost, OnAttempt, Pause, Pull, Reply, Send, Steps
from ragfence.core.document import Document
from ragfence.core.receipts import OnError, Receipt, collect
from ragfence.errors import ValidationError

if TYPE_CHECKING:
    import httpx

P = ParamSpec("P")
T = TypeVar("T")


def _run(call: Callable[Concatenate[ClientCalls, P], Steps[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(call(client._core, *args, **kwargs))

    return method


def _iterate(
    call: Callable[Concatenate[ClientCalls, P], Steps[None]],
) -> Callable[Concatenate[Client, P], Iterator[dict[str, Any]]]:
    @wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[dict[str, Any]]:
        return client._iterate(call(client._core, *args, **kwargs))

    return method


class Client:
    """A connection to a ragfence server. Threads may share one; `close()` or `with` closes it.

    Args:
        url: Address of the server. Default: RAGFENCE_URL, then `ragfence serve --insecure-dev` on this machine.
        api_key: Default: RAGFENCE_API_KEY, if it is set.
        timeout_s: Limits one attempt; `retry` limits a call with all its attempts.
        retry: Pauses between attempts, and the time for a call.
        run: A name for one pass of a loader: its idempotency keys are then made from content, see docs/client.md.
        allow_http: Sends the API key over plain HTTP to hosts other than loopback. Default: RAGFENCE_ALLOW_HTTP=1.
        on_attempt: Called with a `RequestAttempt` after each request; `AttemptLog` writes them to a CSV file.
        transport: An httpx transport: a proxy, certificates, or an application in this process.
        sleep: Waits between attempts; for tests.
        clock: Monotonic seconds; for tests.

    >>> Client("https://ingest.example").ingest(ragfence.Document("a", "some text"))  # doctest: +SKIP
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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._core = make_calls(url, api_key, timeout_s, retry, run, clock, on_attempt)
        self._session = ClientSession(self._core, allow_http=allow_http)
        self._transport = transport
        self._sleep = sleep
        self._connect()

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
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = ...,
        batch: int = ...,
        max_batch_bytes: int = ...,
        wait_s: float = ...,
        stream: Literal[False] = ...,
        on_error: OnError = ...,
    ) -> list[Receipt]: ...
    @overload
    def ingest_many(
        self,
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = ...,
        batch: int = ...,
        max_batch_bytes: int = ...,
        wait_s: float = ...,
        stream: Literal[True],
        on_error: OnError = ...,
    ) -> Iterator[Receipt]: ...
    def ingest_many(
        self,
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = False,
        batch: int = BATCH,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        wait_s: float = WAIT_S,
        stream: bool = False,
        on_error: OnError = "return",
    ) -> list[Receipt] | Iterator[Receipt]:
        """Sends many documents in batches, and returns one receipt for each, in their order.

        A document that is invalid, stale or conflicting gets a receipt with `.failure`, whose decision is `refused`,
        `stale`, `conflict` or `in_flight`; the other documents of its batch are ingested.

        Args:
            documents: Read while they are sent; only one batch is held in memory.
            progress: True shows a bar on stderr; a callable is called with the number of documents done.
            batch: Largest number of documents in a batch.
            max_batch_bytes: Largest size of a batch.
            wait_s: Time for one batch with all its attempts.
            stream: Returns an iterator that sends batches while it is read.
            on_error: With "raise", the first document that fails raises what `ingest` would. The documents before it
                stay ingested; unless `stream`, their receipts are in `error.details["receipts"]`.
        """
        batching = ClientBatches(progress, batch, max_batch_bytes, wait_s, on_error)
        receipts = self._iterate(batches.ingest_many(self._core, documents, batching))
        return receipts if stream else collect(receipts)

    def load(
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
        """Like `ingest_many`, for a LangChain loader, a LlamaIndex reader, an iterable of documents, or a path.

        `doc_id` computes the id from a document of the loader, where the document's own id is not good enough.

        >>> client.load(PyPDFLoader("a.pdf"), doc_id=lambda p: f"a.pdf#{p.metadata['page']}")  # doctest: +SKIP
        """
        batching = ClientBatches(progress, batch, max_batch_bytes, wait_s, on_error)
        return collect(self._iterate(batches.load(self._core, loader, batching, doc_id=doc_id)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._core.settings.url!r})"

    def _run(self, steps: Steps[T]) -> T:
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            outcome = self._execute(step)

    def _iterate(self, steps: Steps[None]) -> Generator[Any, None, None]:
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
                    outcome = self._execute(step)

    def _execute(self, step: Send | Pause | Pull | Give) -> Any:
        match step:
            case Send():
                return self._send(step)
            case Pause(seconds):
                return self._sleep(seconds)
            case Pull(source):
                if not isinstance(source, Iterator):
                    raise ValidationError(
                        "an asynchronous iterable of documents needs `async for`", hint="use AsyncClient"
                    )
                return next(source, END)
        raise AssertionError(step)

    def _send(self, send: Send) -> Reply | Lost:
        if self._process != os.getpid():
            self._connect()
        if self._http.is_closed:
            raise closed_error()
        httpx, until = self._session.httpx, time.monotonic() + send.whole_s
        try:
            with self._http.stream(**self._session.arguments(send)) as response:
                parts = []
                for part in response.iter_bytes():
                    if time.monotonic() > until:
                        return self._session.timed_out(send)
                    parts.append(part)
                return Reply(response.status_code, response.headers, b"".join(parts))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return self._session.lost(error)

    def _connect(self) -> None:
        """Opens connections of this process: after a fork, parent and child would read each other's answers."""
        self._http: httpx.Client = self._session.httpx.Client(**self._session.options(self._transport))
        self._process = os.getpid()
