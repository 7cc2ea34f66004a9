"""`DocumentConsumer`: messages that are documents, ingested in batches.

A message is what `POST /v1/documents` takes, refused for the same mistakes:

    {"doc_id": "handbook/leave", "text": "Thirty days a year.", "metadata": {"team": "people"}, "sequence": 7}
    {"action": "retract", "doc_id": "handbook/leave", "sequence": 8}

What was received is ingested together, in one segment, and acknowledged in one call after the seal, so throughput is
that of documents. A queue may deliver an older revision after a newer one: with a `sequence` it is stale, without one
the last delivery wins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from ragfence.core.backoff import Backoff
from ragfence.core.document import Document
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.documents.claims import GivenDocument, Retraction
from ragfence.engine.gc_pause import gc_paused
from ragfence.engine.refusals import is_outage
from ragfence.errors import InFlight, Quarantined, RagfenceError, Stale, TransientError
from ragfence.queues.loop import RETRY, UNUSABLE, Admit, MessageLoop, OnResult, Process, describe
from ragfence.queues.transport import Message, Transport
from ragfence.wire.problems import RequestRefused
from ragfence.wire.schemas import DocumentIn, RetractIn
from ragfence.wire.validation import validated

KIND: Final = "document"
BATCH: Final = 500
_log = logging.getLogger("ragfence.queues")


class DocumentBatches(Protocol):
    """What the consumer needs of `fence.documents`."""

    def ingest_each(
        self, given: Sequence[GivenDocument], *, wait_s: float | None = None, route: str = ""
    ) -> list[Receipt | Exception]: ...


class BatchFence(Protocol):
    """What the consumer needs of a fence."""

    @property
    def tenant(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def documents(self) -> DocumentBatches: ...
    def notify(self, event: object) -> None: ...


def document_of(message: Message) -> Document | Retraction:
    """Returns the document of a message, or what is to be retracted.

    Raises:
        RequestRefused: the body is not a document, as the HTTP API refuses it.
    """
    body = message.body
    if isinstance(body, dict) and body.get("action") is not None:
        retract = validated(body, RetractIn)
        return Retraction(retract.doc_id, retract.sequence)
    given = validated(body, DocumentIn)
    return given.document(given.doc_id)


class DocumentConsumer(MessageLoop):
    """Ingests and retracts the documents of a queue.

    New and known documents are acknowledged after the seal, stale ones as well. A document that is invalid or in
    conflict becomes a dead letter with the reason. One that another process is ingesting is put back; one that failed
    comes again after a random, growing delay, at most `max_attempts` times.

    Args:
        fence: Where documents are ingested; or a function that returns the fence of a message's tenant.
        document: Makes the document of a message; by default the message is one.
        max_attempts: After how many deliveries a document that keeps failing is given up.
        batch: How many messages are received, and ingested, at once.
        wait_s: How long to wait for the first of them.
        retry: The delays of a document that failed.
        on_result: Called when a message is done with.
        admit: How many messages of a tenant may be handled now, as for `Consumer`.

    >>> DocumentConsumer(fence, open_transport("redis://localhost:6379/0?queue=docs")).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        fence: BatchFence | Callable[[str], BatchFence],
        transport: Transport,
        *,
        document: Callable[[Message], Document | Retraction] = document_of,
        max_attempts: int = 5,
        batch: int = BATCH,
        wait_s: float = 5.0,
        retry: Backoff = RETRY,
        on_result: OnResult | None = None,
        admit: Admit | None = None,
    ) -> None:
        self._document = document
        super().__init__(
            fence,
            transport,
            kind=KIND,
            max_attempts=max_attempts,
            batch=batch,
            wait_s=wait_s,
            retry=retry,
            on_result=on_result,
            admit=admit,
        )

    @contextlib.contextmanager
    def _processing(self) -> Iterator[Process]:
        yield self._process_all

    def _process_all(self, messages: Sequence[Message]) -> None:
        by_caller: dict[tuple[str, str], list[tuple[Message, GivenDocument]]] = {}
        for message in messages:
            if self._stopping.is_set():
                self._put_back(message, "returned", 0)
            elif (given := self._given(message)) is not None:
                route = message.route or f"queue:{self._transport.name}"
                by_caller.setdefault((message.tenant, route), []).append((message, given))
        with gc_paused():
            for (_, route), entries in by_caller.items():
                self._ingest(entries, route)

    def _given(self, message: Message) -> GivenDocument | None:
        """The document of a message; None if it cannot be one, which is settled here."""
        try:
            document = self._document(message)
        except RequestRefused as refused:
            self._bury(message, f"{refused.problem.code}: {refused.problem.detail}")
        except UNUSABLE as error:
            self._bury(message, f"the message is not a document: {error}")
        else:
            if self._one_fence is None or message.tenant in ("", self._one_fence.tenant):
                return GivenDocument(document, event_id=message.event_id, correlation_id=message.dedupe_key)
            self._bury(message, f"the document belongs to tenant {message.tenant!r}, which is not consumed here")
        return None

    def _ingest(self, entries: Sequence[tuple[Message, GivenDocument]], route: str) -> None:
        given = [document for _, document in entries]
        try:
            documents = self._documents_of(entries[0][0])
            outcomes: Sequence[Receipt | Exception] = documents.ingest_each(given, wait_s=0, route=route)
        except Exception as error:  # noqa: BLE001  # all of it is settled below
            if is_outage(error):
                self._after_an_outage([message for message, _ in entries], error)
                return
            if len(entries) > 1:  # each is ingested alone, so that only its own message is to blame
                for entry in entries:
                    self._ingest([entry], route)
                return
            outcomes = [error]
        else:
            self._outages = 0
        for (message, _), outcome in zip(entries, outcomes, strict=True):
            self._conclude(message, outcome)

    def _documents_of(self, message: Message) -> DocumentBatches:
        fence: BatchFence = self._fence_of(message)
        return fence.documents

    def _conclude(self, message: Message, outcome: Receipt | Exception) -> None:
        match outcome:
            case Receipt():
                self._acknowledge(message, str(outcome.decision), outcome)
            case Stale():
                self._acknowledge(message, "stale")
            case InFlight():
                self._put_back_in_flight(message)
            case Quarantined():
                self._bury(message, f"{outcome.code}: {outcome.message}")
            case RagfenceError() if not isinstance(outcome, TransientError):
                self._bury(message, f"{outcome.code}: {outcome.message}")
            case _:
                self._after_an_error(message, outcome)

    def _after_an_outage(self, messages: Sequence[Message], error: Exception) -> None:
        """A store did not answer: no message is to blame."""
        reason = describe(error)
        _log.warning("%d messages are put back: %s", len(messages), reason)
        for message in messages:
            self._postpone(message, reason)
        self._outages += 1

    def _after_an_error(self, message: Message, error: Exception) -> None:
        reason = describe(error)
        _log.warning("message %s failed (attempt %d): %s", message.message_id, message.attempt, reason, exc_info=error)
        self._again(message, reason)
