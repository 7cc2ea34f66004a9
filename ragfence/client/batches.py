"""Many documents: sent as NDJSON in batches, with one receipt each, in their order, in bounded memory.

One batch is pending in memory, as it is sent, because it may have to be sent again: an answer without its last line was
cut off, and the batch is sent again under the same key.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ragfence._progress import meter
from ragfence.client.calls import ClientCalls, document_json, receipt_in
from ragfence.client.errors import error_from_problem
from ragfence.client.steps import END, Give, Pull, Reply, Steps
from ragfence.core.document import Document
from ragfence.core.receipts import Decision, OnError, Receipt, refused_receipt
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
    """How a sequence of documents is sent; see `Client.ingest_many`."""

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
    """Yields one receipt for each document. Nothing is read or sent before the first receipt is requested."""
    if isinstance(documents, Document):  # a named tuple, so it could be iterated over
        raise ValidationError(
            "ingest_many takes an iterable of documents", hint="use ingest(document), or pass [document]"
        )
    total = len(documents) if isinstance(documents, Sized) else None
    source = aiter(documents) if isinstance(documents, AsyncIterable) else iter(documents)
    return _send(core, Pull(source), total, batching)


def load(
    core: ClientCalls, loader: object, batching: ClientBatches, *, doc_id: Callable[[Any], str] | None = None
) -> Steps[None]:
    """Like `ingest_many`, for the documents of a loader."""
    return _send(core, Pull(_entries(loader, doc_id)), None, batching)


def _send(core: ClientCalls, pull: Pull, total: int | None, batching: ClientBatches) -> Steps[None]:
    done = position = 0
    pending = _PendingBatch()
    with meter(batching.progress, total, "sending") as report:
        while True:
            given = yield pull
            line = None if given is END else _line(given, position)
            position += 1
            # With `raise`, an invalid document ends the last batch: those before it are sent, those after it are not.
            last = line is None or (batching.on_error == "raise" and isinstance(line, RefusedDocument))
            if last or (line is not None and pending.is_full(line, batching)):
                outcomes = yield from _send_batch(core, pending, batching.wait_s)
                for at, outcome in enumerate(outcomes, start=done):
                    if batching.on_error == "raise" and isinstance(outcome, RefusedDocument):
                        raise _at(outcome.error, at)
                    yield Give(outcome.receipt if isinstance(outcome, RefusedDocument) else outcome)
                done += len(outcomes)
                report(done)
                pending = _PendingBatch()
            if last and isinstance(line, RefusedDocument):
                raise _at(line.error, position - 1)
            if line is None:
                return
            pending.add(line)


class RefusedDocument(NamedTuple):
    """A document that this client or the server refused."""

    error: RagfenceError

    @property
    def receipt(self) -> Receipt:
        """The receipt that is returned for it."""
        error = self.error
        decision = next((decision for kind, decision in _DECISIONS if isinstance(error, kind)), Decision.REFUSED)
        receipt = refused_receipt(error, str(error.details.get("key") or ""), decision)
        more = {"hint": error.hint, "retryable": error.retryable}
        return receipt._replace(failure={**(receipt.failure or {}), **more})


Outcome = Receipt | RefusedDocument
Line = bytes | RefusedDocument
"""A document as it is sent, or why it cannot be sent."""


@dataclass(slots=True)
class _PendingBatch:
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
        return document_json(given, position=position)[1] + b"\n"  # type: ignore[arg-type]  # checked there
    except DocumentInvalid as invalid:
        return RefusedDocument(invalid)


def _send_batch(core: ClientCalls, pending: _PendingBatch, wait_s: float) -> Steps[list[Outcome]]:
    body = b"".join(line for line in pending.lines if isinstance(line, bytes))
    if not body:
        return [line for line in pending.lines if isinstance(line, RefusedDocument)]
    count = sum(isinstance(line, bytes) for line in pending.lines)
    sent = core.write(
        "POST",
        PATH,
        body,
        lambda reply: _outcomes(reply, count, core.settings.secret),
        key=None,
        headers=_NDJSON,
        budget_s=wait_s,
    )
    answers = iter((yield from sent))
    return [next(answers) if isinstance(line, bytes) else line for line in pending.lines]


def _outcomes(reply: Reply, count: int, secret: str) -> list[Outcome] | None:
    """Returns one outcome for each document, or None if the answer was cut off."""
    *lines, last = [line for line in reply.body.split(b"\n") if line] or [b""]
    try:
        end = json.loads(last)
    except ValueError:
        return None
    if not isinstance(end, dict) or end.get("done") is not True:
        return None
    try:
        replies = [json.loads(line) for line in lines]
        if [each["line"] for each in replies] != list(range(1, count + 1)):
            raise ValueError(f"{len(replies)} outcomes for {count} documents")
        return [_outcome(each, secret) for each in replies]
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise ApiRefused(
            f"the server's answer to the batch has no outcome per line: {broken!r}",
            hint="is this server as new as this client?",
            status=reply.status,
            code="API.unreadable",
        ) from broken


def _outcome(reply: dict[str, Any], secret: str) -> Outcome:
    if "receipt" in reply:
        return receipt_in(reply["receipt"])
    return RefusedDocument(error_from_problem(reply["problem"], secret, status=reply["status"]))


def _at(error: RagfenceError, position: int) -> RagfenceError:
    error.details["position"] = position
    return error


def _entries(loader: Any, doc_id: Callable[[Any], str] | None) -> Iterator[Document | DocumentInvalid]:
    """Yields each document of a loader, or the error of one that is invalid."""
    # Only here: a client that does not load from files needs none of the sources.
    from ragfence.documents.sources import DocumentsSource, source_of

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
