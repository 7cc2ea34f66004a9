"""`Client`: performs the steps of every call, and blocks."""

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
from ragfence.client.session import TIMEOUT_S, ClientSession, core_of
from ragfence.client.steps import END, Give, Lost, Pause, Pull, Reply, Send, Steps
from ragfence.core.receipts import Receipt
from ragfence.documents.document import Document
from ragfence.documents.ingest import OnError, collect
from ragfence.errors import ValidationError

if TYPE_CHECKING:
    import httpx

P = ParamSpec("P")
T = TypeVar("T")


def _done(call: Callable[Concatenate[ClientCalls, P], Steps[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._done(call(client._core, *args, **kwargs))

    return method


def _each(
    call: Callable[Concatenate[ClientCalls, P], Steps[None]],
) -> Callable[Concatenate[Client, P], Iterator[dict[str, Any]]]:
    @wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[dict[str, Any]]:
        return client._each(call(client._core, *args, **kwargs))

    return method


class Client:
    """A ragfence server. Any number of threads may share one; it is closed by `close()` or `with`.

    url, api_key   not given: RAGFENCE_URL and RAGFENCE_API_KEY; without those, what `ragfence serve --insecure-dev`
                   serves on this machine
    timeout_s      for one attempt; `retry` says how long a call may take with all its attempts
    run            a name for one pass of a loader: its keys are then made from content, see docs/client.md
    allow_http     send the API key over plain http to other hosts than loopback; RAGFENCE_ALLOW_HTTP=1, unless given
    transport      an httpx transport: a proxy, certificates, or an application in this process

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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._core = core_of(url, api_key, timeout_s, retry, run, clock)
        self._asking = ClientSession(self._core, allow_http=allow_http)
        self._transport = transport
        self._sleep = sleep
        self._fresh()

    ingest = _done(calls.ingest)
    put = _done(calls.put)
    retract = _done(calls.retract)
    get = _done(calls.get)
    snippets = _done(calls.snippets)
    receipt = _done(calls.receipt)
    build = _done(calls.build)
    builds = _done(calls.builds)
    swap = _done(calls.swap)
    rollback = _done(calls.rollback)
    resolve = _done(calls.resolve)
    aliases = _done(calls.aliases)
    history = _done(calls.history)
    search = _done(calls.search)
    decisions = _each(calls.decisions)
    keys = _each(calls.keys)
    stats = _done(calls.stats)
    release = _done(calls.release)
    purge = _done(calls.purge)
    purge_expired = _done(calls.purge_expired)

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
        """Sends many documents in batches: one receipt each, in their order.

        A document that is invalid, stale or conflicting is an entry with `.failure`, whose decision is `refused`,
        `stale`, `conflict` or `in_flight`; the others of its batch are ingested. With `on_error="raise"` the first of
        them raises what `ingest` would; what came before it stays ingested (`error.details["receipts"]`, unless
        `stream`). `wait_s` is for one batch. `stream=True` returns an iterator that sends while it is read.
        """
        batching = ClientBatches(progress, batch, max_batch_bytes, wait_s, on_error)
        receipts = self._each(batches.ingest_many(self._core, documents, batching))
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
        """As `ingest_many`, for a LangChain loader, a LlamaIndex reader, an iterable of documents, or a path.

        `doc_id` makes the id out of a document of the loader's, where its own is not good enough.

        >>> client.load(PyPDFLoader("a.pdf"), doc_id=lambda p: f"a.pdf#{p.metadata['page']}")  # doctest: +SKIP
        """
        batching = ClientBatches(progress, batch, max_batch_bytes, wait_s, on_error)
        return collect(self._each(batches.load(self._core, loader, batching, doc_id=doc_id)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._core.conduct.url!r})"

    def _done(self, steps: Steps[T]) -> T:
        came: Any = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as done:
                result: T = done.value
                return result
            came = self._performed(step)

    def _each(self, steps: Steps[None]) -> Generator[Any, None, None]:
        came: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(came)
                except StopIteration:
                    return
                if isinstance(step, Give):
                    yield step.value
                    came = None
                else:
                    came = self._performed(step)

    def _performed(self, step: Send | Pause | Pull | Give) -> Any:
        match step:
            case Send():
                return self._asked(step)
            case Pause(seconds):
                return self._sleep(seconds)
            case Pull(source):
                if not isinstance(source, Iterator):
                    raise ValidationError("these documents are read with `async for`", hint="use AsyncClient")
                return next(source, END)
        raise AssertionError(step)

    def _asked(self, send: Send) -> Reply | Lost:
        if self._process != os.getpid():
            self._fresh()
        httpx, until = self._asking.httpx, time.monotonic() + send.whole_s
        try:
            with self._http.stream(**self._asking.arguments(send)) as response:
                parts = []
                for part in response.iter_bytes():
                    if time.monotonic() > until:
                        return self._asking.too_slow(send)
                    parts.append(part)
                return Reply(response.status_code, response.headers, b"".join(parts))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return self._asking.trouble(error)

    def _fresh(self) -> None:
        """Connections of this process's own: after a fork, parent and child would read each other's answers."""
        self._http: httpx.Client = self._asking.httpx.Client(**self._asking.options(self._transport))
        self._process = os.getpid()
