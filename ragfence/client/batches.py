"""Many documents: sent as NDJSON in batches, answered by one receipt each, in their order, in bounded memory.

One batch is held at a time, as it is sent, because it may have to be sent again: an answer without its last line was
cut off, and is asked for again under the same key.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ragfence.client.calls import ClientCalls
from ragfence.client.errors import error_of
from ragfence.client.steps import END, Give, Pull, Reply, Steps
from ragfence.client.values import document_json, receipt_in
from ragfence.core.receipts import Decision, Receipt
from ragfence.documents.document import Document
from ragfence.documents.head_moves import refused
from ragfence.documents.ingest import OnError
from ragfence.documents.progress import meter
from ragfence.documents.sources import DocumentsSource, source_of
from ragfence.errors import (
    ApiRefused,
    Conflict,
    DocumentInvalid,
    InFlight,
    Quarantined,
    RagfenceError,
    Stale,
    ValidationError,
)

PATH: Final = "/v1/documents:batch"
BATCH: Final = 500
MAX_BATCH: Final = 10_000
MAX_BATCH_BYTES: Final = 8 * 2**20
WAIT_S: Final = 120.0

_NDJSON: Final = {"Content-Type": "application/x-ndjson", "Accept": "application/x-ndjson"}
_DECISIONS: Final[tuple[tuple[type[RagfenceError], Decision], ...]] = (
    (Conflict, Decision.CONFLICT),
    (Stale, Decision.STALE),
    (InFlight, Decision.IN_FLIGHT),
    (Quarantined, Decision.IN_FLIGHT),
)

Documents = Iterable[Document] | AsyncIterable[Document]


@dataclass(frozen=True, slots=True)
class ClientBatches:
    """How many documents are sent; see `ingest_many` of the clients."""

    progress: bool | Callable[[int], None] = False
    batch: int = BATCH
    max_batch_bytes: int = MAX_BATCH_BYTES
    wait_s: float = WAIT_S
    on_error: OnError = "return"

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= MAX_BATCH:
            raise ValidationError(f"batch must be from 1 to {MAX_BATCH:,}, not {self.batch}")
        if self.max_batch_bytes < 1:
            raise ValidationError(f"max_batch_bytes must be above 0, not {self.max_batch_bytes}")
        if self.on_error not in ("return", "raise"):
            raise ValidationError(f'on_error must be "return" or "raise", not {self.on_error!r}')


def ingest_many(core: ClientCalls, documents: Documents, batching: ClientBatches) -> Steps[None]:
    """Gives one receipt for each document. Nothing is read or sent before the first is asked for."""
    if isinstance(documents, Document):  # a tuple, which could be iterated over
        raise ValidationError("ingest_many takes many documents", hint="use ingest(document), or pass [document]")
    total = len(documents) if isinstance(documents, Sized) else None
    source = aiter(documents) if isinstance(documents, AsyncIterable) else iter(documents)
    return _sent(core, Pull(source), total, batching)


def load(
    core: ClientCalls, loader: object, batching: ClientBatches, *, doc_id: Callable[[Any], str] | None = None
) -> Steps[None]:
    """As `ingest_many`, for what a loader has."""
    return _sent(core, Pull(_entries(loader, doc_id)), None, batching)


def _sent(core: ClientCalls, pull: Pull, total: int | None, batching: ClientBatches) -> Steps[None]:
    done = position = 0
    held = _SmallBatch()
    with meter(batching.progress, total, "sending") as told:
        while True:
            given = yield pull
            line = None if given is END else _line(given, position)
            position += 1
            # With `raise`, an invalid document ends the last batch: what comes before it is sent, and nothing after it.
            last = line is None or (batching.on_error == "raise" and isinstance(line, RefusedDocument))
            if last or (line is not None and held.is_full(line, batching)):
                outcomes = yield from _answered(core, held, batching.wait_s)
                for at, outcome in enumerate(outcomes, start=done):
                    if batching.on_error == "raise" and isinstance(outcome, RefusedDocument):
                        raise _at(outcome.error, at)
                    yield Give(outcome.receipt if isinstance(outcome, RefusedDocument) else outcome)
                done += len(outcomes)
                told(done)
                held = _SmallBatch()
            if last and isinstance(line, RefusedDocument):
                raise _at(line.error, position - 1)
            if line is None:
                return
            held.add(line)


class RefusedDocument(NamedTuple):
    """A document that was not ingested, by this client or by the server."""

    error: RagfenceError

    @property
    def receipt(self) -> Receipt:
        """What stands in the place of its receipt."""
        error = self.error
        decision = next((decision for kind, decision in _DECISIONS if isinstance(error, kind)), Decision.REFUSED)
        receipt = refused(error, str(error.details.get("key") or ""), decision)
        told = {"hint": error.hint, "retryable": error.retryable}
        return receipt._replace(failure={**(receipt.failure or {}), **told})


Outcome = Receipt | RefusedDocument
Line = bytes | RefusedDocument
"""A document as it is sent, or why it cannot be."""


@dataclass(slots=True)
class _SmallBatch:
    lines: list[Line] = field(default_factory=list)
    size: int = 0

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.size += len(line) if isinstance(line, bytes) else 0

    def is_full(self, line: Line, batching: ClientBatches) -> bool:
        if not self.lines:
            return False
        size = len(line) if isinstance(line, bytes) else 0
        return len(self.lines) >= batching.batch or self.size + size > batching.max_batch_bytes


def _line(given: object, position: int) -> Line:
    try:
        if isinstance(given, DocumentInvalid):
            raise given
        return document_json(given, position=position)[1] + b"\n"  # type: ignore[arg-type]  # it is checked there
    except DocumentInvalid as invalid:
        return RefusedDocument(invalid)


def _answered(core: ClientCalls, held: _SmallBatch, wait_s: float) -> Steps[list[Outcome]]:
    body = b"".join(line for line in held.lines if isinstance(line, bytes))
    if not body:
        return [line for line in held.lines if isinstance(line, RefusedDocument)]
    count = sum(isinstance(line, bytes) for line in held.lines)
    sent = core.write(
        "POST",
        PATH,
        body,
        lambda reply: _outcomes(reply, count, core.conduct.secret),
        key=None,
        headers=_NDJSON,
        budget_s=wait_s,
    )
    answers = iter((yield from sent))
    return [next(answers) if isinstance(line, bytes) else line for line in held.lines]


def _outcomes(reply: Reply, count: int, secret: str) -> list[Outcome] | None:
    """None: the answer was cut off."""
    *lines, last = [line for line in reply.body.split(b"\n") if line] or [b""]
    try:
        end = json.loads(last)
    except ValueError:
        return None
    if not isinstance(end, dict) or end.get("done") is not True:
        return None
    try:
        told = [json.loads(line) for line in lines]
        if [each["line"] for each in told] != list(range(1, count + 1)):
            raise ValueError(f"{len(told)} outcomes for {count} documents")
        return [_outcome(each, secret) for each in told]
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise ApiRefused(
            f"the server answered the batch, but not line by line: {broken!r}",
            hint="is this server as new as this client?",
            status=reply.status,
            code="API.unreadable",
        ) from broken


def _outcome(told: dict[str, Any], secret: str) -> Outcome:
    if "receipt" in told:
        return receipt_in(told["receipt"])
    return RefusedDocument(error_of(told["problem"], secret, status=told["status"]))


def _at(error: RagfenceError, position: int) -> RagfenceError:
    error.details["position"] = position
    return error


def _entries(loader: Any, doc_id: Callable[[Any], str] | None) -> Iterator[Document | DocumentInvalid]:
    """What a loader has, each as a document or as what is wrong with it."""
    with contextlib.ExitStack() as opened:
        if callable(lazy_load := getattr(loader, "lazy_load", None)):  # LangChain
            source: Any = DocumentsSource(lazy_load(), name=type(loader).__name__, doc_id=doc_id)
        elif callable(load_data := getattr(loader, "load_data", None)):  # LlamaIndex
            source = DocumentsSource(load_data(), name=type(loader).__name__, doc_id=doc_id)
        elif doc_id is not None:
            source = DocumentsSource(loader, doc_id=doc_id)
        else:
            source = source_of(loader)
            if source is not loader and callable(close := getattr(source, "close", None)):
                opened.callback(close)
        for item in source.items():
            try:
                yield item.load()
            except DocumentInvalid as invalid:
                yield invalid
