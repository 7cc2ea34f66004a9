"""Group commit: documents that different clients send at the same time become one segment.

A document that comes alone goes at once. While others are under way, those that come gather for a few milliseconds and
go together, and nobody is answered before the segment with his document is durable. Documents do not spoil or delay
each other: one that is invalid, stale or fails has its own error, one that somebody else is working on leaves its group
and is tried again with a later one. The documents of one doc_id go one after the other, in the order they came in.
"""

from __future__ import annotations

import asyncio
import copy
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ragfence.core.document import CheckedDocument, Document
from ragfence.core.receipts import Receipt
from ragfence.documents.claims import GivenDocument
from ragfence.engine.requests import acting_key
from ragfence.errors import InFlight, TransientError
from ragfence.wire.problems import RequestRefused, refusal

if TYPE_CHECKING:
    from ragfence.documents.documents import Documents

FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.25


class GroupCommit:
    """Belongs to one event loop.

    delay_ms       how long a document waits for company while others are under way
    max_documents  and max_bytes: what one group holds at most
    max_waiting    documents that have no answer yet; more are refused with DEPENDENCY.overloaded
    groups         how many are under way at the same time: more than one gains something only where the stores are far
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
        self._under_way = 0
        self._unanswered = 0
        self._waiting: deque[_Sent] = deque()
        self._busy: set[object] = set()
        """the doc_ids under way, or between two tries: whoever sends them too comes after them"""
        self._timer: asyncio.Handle | None = None
        self._all_answered: asyncio.Future[None] | None = None

    async def ingest(self, document: Document | CheckedDocument, *, event_id: str = "") -> Receipt:
        """As `fence.documents.ingest`: the same receipt, the same errors.

        Whoever is cancelled is not answered; the document may have been ingested all the same.
        """
        if self._unanswered >= self._max_waiting:
            raise RequestRefused(
                refusal("DEPENDENCY.overloaded", f"{self._max_waiting:,} documents wait to be ingested")
            )
        loop = asyncio.get_running_loop()
        sent = _Sent(document, loop.create_future(), event_id)
        self._unanswered += 1
        self._waiting.append(sent)
        self._soon(loop)
        return await sent.answered

    async def finish(self) -> None:
        """Once everything that was sent has its answer."""
        while self._unanswered:
            if self._all_answered is None:
                self._all_answered = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._all_answered)

    def _soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None or self._under_way >= self._groups:
            return
        if self._under_way == 0 or len(self._waiting) >= self._max_documents:
            # Not here and now: what else the loop has ready in this turn comes along.
            self._timer = loop.call_soon(self._go, loop)
        else:
            self._timer = loop.call_later(self._delay_s, self._go, loop)

    def _go(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        while self._under_way < self._groups and (group := self._next_group()):
            self._under_way += 1
            asked = [GivenDocument(sent.document, sent.waited_s(), sent.event_id, sent.api_key) for sent in group]
            work = loop.run_in_executor(None, partial(self._documents.ingest_each, asked, wait_s=0))
            work.add_done_callback(lambda done, group=group: self._back(loop, group, done))  # type: ignore[misc]

    def _next_group(self) -> list[_Sent]:
        """What has waited longest, with every doc_id once."""
        group: list[_Sent] = []
        passed: list[_Sent] = []
        held: set[object] = set()
        size = 0
        while self._waiting and len(group) < self._max_documents and size < self._max_bytes:
            sent = self._waiting.popleft()
            if sent.answered.done():  # cancelled before it began
                self._answered(sent)
            elif sent.name in self._busy or sent.name in held or (sent.alone and group):
                held.add(sent.name)
                passed.append(sent)
            else:
                self._busy.add(sent.name)
                group.append(sent)
                size += sent.size
                if sent.alone:
                    break
        self._waiting.extendleft(reversed(passed))
        return group

    def _back(
        self, loop: asyncio.AbstractEventLoop, group: Sequence[_Sent], done: asyncio.Future[list[Receipt | Exception]]
    ) -> None:
        self._under_way -= 1
        for sent, outcome in zip(group, _outcomes(group, done), strict=True):
            if outcome is None:
                sent.alone = True
                self._busy.discard(sent.name)
                self._waiting.appendleft(sent)
            elif isinstance(outcome, InFlight) and not sent.is_late(self._wait_s):
                loop.call_later(sent.pause(), self._again, loop, sent)
            else:
                self._busy.discard(sent.name)
                sent.answer(outcome)
                self._answered(sent)
        if self._waiting and self._timer is None:
            # Those who were just answered are likely to send the next: it goes along instead of after this one.
            delay_s = self._delay_s if len(self._waiting) < self._max_documents else 0
            self._timer = loop.call_later(delay_s, self._go, loop)

    def _again(self, loop: asyncio.AbstractEventLoop, sent: _Sent) -> None:
        self._busy.discard(sent.name)
        self._waiting.appendleft(sent)  # before those with its doc_id that came after it
        self._soon(loop)

    def _answered(self, sent: _Sent) -> None:
        self._unanswered -= 1
        if not self._unanswered and self._all_answered is not None:
            self._all_answered.set_result(None)
            self._all_answered = None


class _Sent:
    """A document, and who waits for it."""

    __slots__ = ("_pause_s", "_since", "alone", "answered", "api_key", "document", "event_id", "name", "size")

    def __init__(
        self, document: Document | CheckedDocument, answered: asyncio.Future[Receipt], event_id: str = ""
    ) -> None:
        self.document = document
        self.event_id = event_id
        self.api_key = acting_key.get()
        self.answered = answered
        self.alone = False
        """something went wrong with its group, and nobody knows on whose account"""
        given: Any = document.doc_id  # nothing of a document is checked yet
        text: Any = document.text
        self.name: object = unicodedata.normalize("NFC", given) if isinstance(given, str) else id(self)
        self.size = len(text) if isinstance(text, str) else 0
        self._since = time.monotonic()
        self._pause_s = FIRST_PAUSE_S

    def waited_s(self) -> float:
        return time.monotonic() - self._since

    def is_late(self, wait_s: float) -> bool:
        return self.waited_s() >= wait_s

    def pause(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 1.5, LAST_PAUSE_S)
        return pause_s

    def answer(self, outcome: Receipt | Exception) -> None:
        if self.answered.done():  # its caller was cancelled
            return
        if isinstance(outcome, Receipt):
            self.answered.set_result(outcome)
        else:
            self.answered.set_exception(outcome)


def _outcomes(
    group: Sequence[_Sent], done: asyncio.Future[list[Receipt | Exception]]
) -> Iterable[Receipt | Exception | None]:
    """What became of each; None: to be tried alone."""
    error = asyncio.CancelledError() if done.cancelled() else done.exception()
    if error is None:
        return done.result()
    if isinstance(error, TransientError):  # a store did not answer, and would not answer each of them either
        return [copy.copy(error) for _ in group]  # each his own: it gathers a traceback as it rises
    if len(group) > 1:
        return [None] * len(group)
    return [error if isinstance(error, Exception) else RuntimeError(f"the ingestion ended with {error!r}")]
