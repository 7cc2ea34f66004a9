"""Group commit: documents that different clients send at the same time become one segment.

A document that arrives alone is ingested at once. While a group is in progress, documents are collected for a few
milliseconds and ingested together; no request is answered before the segment with its document is durable. Documents
neither break nor delay each other: one that is invalid, stale or fails has its own error, and one that another process
is working on leaves its group and is tried again with a later one. Documents with the same doc_id are ingested one by
one, in the order in which they arrived.
"""

from __future__ import annotations

import asyncio
import copy
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ragfence.core.backoff import Backoff
from ragfence.core.document import CheckedDocument, Document
from ragfence.core.receipts import Receipt
from ragfence.documents.claims import GivenDocument
from ragfence.engine.requests import acting_key
from ragfence.errors import InFlight, TransientError
from ragfence.wire.problems import RequestRefused, refusal

if TYPE_CHECKING:
    from ragfence.documents.documents import Documents

BACKOFF: Final = Backoff(first_s=0.005, longest_s=0.25)
"""Between two attempts at a document that another process is working on."""


class GroupCommit:
    """The groups of one event loop.

    Args:
        documents: The documents of one tenant.
        delay_ms: How long documents are collected while a group is in progress.
        max_documents: Largest number of documents in a group.
        max_bytes: Largest size of a group.
        max_waiting: Largest number of documents without an answer; more are refused with DEPENDENCY.overloaded.
        groups: Groups in progress at a time; more than one helps only if the stores are far away.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        delay_ms: float = 3,
        max_documents: int = 500,
        max_bytes: int = 8 << 20,
        max_waiting: int = 10_000,
        groups: int = 1,
    ) -> None:
        self._documents = documents
        self._wait_s = documents._rules.wait_ms / 1000
        self._delay_s = delay_ms / 1000
        self._max_documents = max_documents
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._groups = groups
        self._in_progress = 0
        self._unanswered = 0
        self._waiting: deque[_QueuedDocument] = deque()
        self._busy: set[object] = set()
        """The doc_ids in progress, or between two attempts: other documents with these ids wait."""
        self._timer: asyncio.Handle | None = None
        self._all_answered: asyncio.Future[None] | None = None

    async def ingest(self, document: Document | CheckedDocument, *, event_id: str = "") -> Receipt:
        """Like `fence.documents.ingest`: the same receipt, the same errors.

        A caller that is cancelled gets no answer; the document may be ingested nevertheless.
        """
        if self._unanswered >= self._max_waiting:
            raise RequestRefused(
                refusal("DEPENDENCY.overloaded", f"{self._max_waiting:,} documents wait to be ingested")
            )
        loop = asyncio.get_running_loop()
        queued = _QueuedDocument(document, loop.create_future(), event_id)
        self._unanswered += 1
        self._waiting.append(queued)
        self._schedule(loop)
        return await queued.answer

    async def finish(self) -> None:
        """Waits until every document has its answer."""
        while self._unanswered:
            if self._all_answered is None:
                self._all_answered = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._all_answered)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None or self._in_progress >= self._groups:
            return
        if self._in_progress == 0 or len(self._waiting) >= self._max_documents:
            # Not at once: documents that the loop has ready in this turn join the group.
            self._timer = loop.call_soon(self._start_groups, loop)
        else:
            self._timer = loop.call_later(self._delay_s, self._start_groups, loop)

    def _start_groups(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        while self._in_progress < self._groups and (group := self._next_group()):
            self._in_progress += 1
            given = [
                GivenDocument(queued.document, queued.waited_s(), queued.event_id, queued.api_key) for queued in group
            ]
            work = loop.run_in_executor(None, partial(self._documents.ingest_each, given, wait_s=0))
            work.add_done_callback(lambda done, group=group: self._finish_group(loop, group, done))  # type: ignore[misc]

    def _next_group(self) -> list[_QueuedDocument]:
        """Returns the documents that have waited longest, with every doc_id once."""
        group: list[_QueuedDocument] = []
        skipped: list[_QueuedDocument] = []
        skipped_names: set[object] = set()
        size = 0
        while self._waiting and len(group) < self._max_documents and size < self._max_bytes:
            queued = self._waiting.popleft()
            if queued.answer.done():  # cancelled before it started
                self._count_answer()
            elif queued.name in self._busy or queued.name in skipped_names or (queued.is_alone and group):
                skipped_names.add(queued.name)
                skipped.append(queued)
            else:
                self._busy.add(queued.name)
                group.append(queued)
                size += queued.size
                if queued.is_alone:
                    break
        self._waiting.extendleft(reversed(skipped))
        return group

    def _finish_group(
        self,
        loop: asyncio.AbstractEventLoop,
        group: Sequence[_QueuedDocument],
        done: asyncio.Future[list[Receipt | Exception]],
    ) -> None:
        self._in_progress -= 1
        for queued, outcome in zip(group, _outcomes(group, done), strict=True):
            if outcome is None:
                queued.is_alone = True
                self._busy.discard(queued.name)
                self._waiting.appendleft(queued)
            elif isinstance(outcome, InFlight) and not queued.is_late(self._wait_s):
                loop.call_later(queued.pause(), self._retry, loop, queued)
            else:
                self._busy.discard(queued.name)
                queued.settle(outcome)
                self._count_answer()
        if self._waiting and self._timer is None:
            # Clients that were just answered are likely to send another document, which can join this group.
            delay_s = self._delay_s if len(self._waiting) < self._max_documents else 0
            self._timer = loop.call_later(delay_s, self._start_groups, loop)

    def _retry(self, loop: asyncio.AbstractEventLoop, queued: _QueuedDocument) -> None:
        self._busy.discard(queued.name)
        self._waiting.appendleft(queued)  # before later documents with the same doc_id
        self._schedule(loop)

    def _count_answer(self) -> None:
        self._unanswered -= 1
        if not self._unanswered and self._all_answered is not None:
            self._all_answered.set_result(None)
            self._all_answered = None


class _QueuedDocument:
    """A document, and the future of its receipt."""

    __slots__ = ("_attempts", "_since", "answer", "api_key", "document", "event_id", "is_alone", "name", "size")

    def __init__(
        self, document: Document | CheckedDocument, answer: asyncio.Future[Receipt], event_id: str = ""
    ) -> None:
        self.document = document
        self.event_id = event_id
        self.api_key = acting_key.get()
        self.answer = answer
        self.is_alone = False
        """Whether it is ingested alone, because its group failed with an error of one of its documents."""
        given: Any = document.doc_id  # it may not be checked yet
        text: Any = document.text
        self.name: object = unicodedata.normalize("NFC", given) if isinstance(given, str) else id(self)
        self.size = len(text) if isinstance(text, str) else 0
        self._since = time.monotonic()
        self._attempts = 0

    def waited_s(self) -> float:
        return time.monotonic() - self._since

    def is_late(self, wait_s: float) -> bool:
        return self.waited_s() >= wait_s

    def pause(self) -> float:
        self._attempts += 1
        return BACKOFF.limit_s(self._attempts)

    def settle(self, outcome: Receipt | Exception) -> None:
        if self.answer.done():  # its caller was cancelled
            return
        if isinstance(outcome, Receipt):
            self.answer.set_result(outcome)
        else:
            self.answer.set_exception(outcome)


def _outcomes(
    group: Sequence[_QueuedDocument], done: asyncio.Future[list[Receipt | Exception]]
) -> Iterable[Receipt | Exception | None]:
    """Returns the outcome of each document; None: to be ingested alone."""
    error = asyncio.CancelledError() if done.cancelled() else done.exception()
    if error is None:
        return done.result()
    if isinstance(error, TransientError):  # a store did not answer, and would not answer for each of them either
        return [copy.copy(error) for _ in group]  # a copy each: it gets a traceback as it is raised
    if len(group) > 1:
        return [None] * len(group)
    return [error if isinstance(error, Exception) else RuntimeError(f"the ingestion ended with {error!r}")]
