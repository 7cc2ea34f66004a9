"""Delivers changes of documents to a sink, around the commit of each batch, and completes work left by crashes."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ragfence.core.layout import BATCH_BYTES, ids_in
from ragfence.core.policy import KindRules
from ragfence.core.records import Head
from ragfence.documents.identity import snippet_texts
from ragfence.documents.log import METADATA, Address, address_in
from ragfence.documents.sinks.intents import Intent, Intents, OwedWork, TouchedSnippets, touched_snippets
from ragfence.documents.sinks.reconciliation import Reconciler, lookup_of
from ragfence.documents.sinks.sink import (
    AFTER_DELETE,
    AFTER_INTENT,
    AFTER_UPSERT,
    BEFORE_DELETE,
    Foreign,
    Settled,
    SinkPending,
    delete_all,
)
from ragfence.documents.sinks.upserts import NewSegment, PlacedRow
from ragfence.engine import crash_points
from ragfence.engine.batch_commit import Answer, BatchCommitter, Move, MovedHead
from ragfence.engine.segment_log import LogRow
from ragfence.errors import RagfenceError, SnapshotGone, StoreUnavailable
from ragfence.stores.fences import FenceStore

BATCH = 500
"""documents compared with the sink at a time"""


class SinkWriter(BatchCommitter):
    """Moves heads as its parent does, and updates the sink accordingly."""

    def __init__(self, delivery: SinkDelivery, *stores: Any, **options: Any) -> None:
        """`delivery` is also the last of its commit hooks."""
        super().__init__(*stores, **options)
        self._delivery = delivery

    def move(self, moves: Sequence[Move], *, wait_s: float = 60.0) -> list[Answer]:
        self._delivery.begin()
        try:
            answers = super().move(moves, wait_s=wait_s)
        except BaseException:
            self._delivery.abort()
            raise
        self._delivery.end(takeover=any(isinstance(answer, MovedHead) and answer.takeover for answer in answers))
        return answers


class SinkDelivery:
    """One sink: the work around each commit and around each call."""

    def __init__(
        self,
        fences: FenceStore,
        intents: Intents,
        reconciler: Reconciler,
        rules: KindRules,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fences = fences
        self._intents = intents
        self._reconciler = reconciler
        self._sink = reconciler.sink
        self._revisions = reconciler.revisions
        self._upserts = reconciler.upserts
        self._wait_s = rules.wait_ms / 1000
        self._lease_s = rules.lease_ms / 1000
        self._sleep = sleep
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._open: dict[str, tuple[int, Intent]] = {}
        """batches in progress: name of the intent -> thread and intent"""
        self._due: dict[str, TouchedSnippets] = {}
        """batches that ended with work left"""
        self._look_at: float | None = 0.0
        """when to look for work left by other processes"""

    def before_commit(self, name: str, rows: Sequence[LogRow]) -> None:
        """Writes the intent, then upserts new snippets. If the sink raises, nothing of the batch is committed."""
        upserts = self._owed_upserts(rows)
        dead = {row.detail.doc_id: snippet_texts(row.detail.dead) for row in rows if row.detail.dead}
        if not upserts and not dead:
            return
        address = address_in(name)
        placed = {row.detail.doc_id: PlacedRow(row, address) for row in rows if row.detail.doc_id in upserts}
        snippets = self._revisions.snippets(placed, upserts)
        if unread := upserts.keys() - snippets.keys():
            raise _unreadable(min(unread))
        intent: Intent = {
            doc_id: OwedWork(list(upserts.get(doc_id, ())), list(dead.get(doc_id, ())))
            for doc_id in dict.fromkeys((*upserts, *dead))
        }
        kept = self._intents.name_at(address)
        with self._lock:
            self._open[kept] = (threading.get_ident(), intent)
        self._intents.put(kept, intent)
        crash_points.reach(AFTER_INTENT)
        try:
            self._upserts.give(snippets, placed, _new_segment(address, rows))
        except SnapshotGone as moved:
            raise _unreadable(min(upserts)) from moved
        except Exception as refused:
            refused.add_note(f"{self._upserts.recipient} refused snippets: no document of this batch is ingested")
            raise
        crash_points.reach(AFTER_UPSERT)

    def after_seal(self, rows: Sequence[LogRow], sealed: Sequence[bool]) -> None:
        """Deletes dead snippets, then checks that these moves are still the newest. Never raises: they are sealed."""
        kept = self._intents.name_at(Address(rows[0].fence.epoch, rows[0].token[:BATCH_BYTES]))
        if kept not in self._open:
            return
        _, intent = self._open[kept]
        crash_points.reach(BEFORE_DELETE)
        moved = {row.detail.doc_id: row for row, ok in zip(rows, sealed, strict=True) if ok}
        try:
            delete_all(self._sink, [each for row in moved.values() for each in snippet_texts(row.detail.dead)])
            crash_points.reach(AFTER_DELETE)
            # Snippets of a sealed move were upserted under its lease: no other process can have come in between.
            unsure = {
                doc_id: owed for doc_id, owed in intent.items() if doc_id not in moved or moved[doc_id].detail.dead
            }
            right_for = {doc_id: moved[doc_id].fence for doc_id in unsure if doc_id in moved}
            waiting = self._reconciler.reconcile(touched_snippets(unsure), right_for)
            if not waiting:
                self._intents.delete(kept)
        except Exception:  # noqa: BLE001  # of a sink or a store: `end` tries again, then warns
            waiting = set(intent)
        if waiting:
            self._stays_due(kept, {doc_id: intent[doc_id] for doc_id in waiting})
            return
        with self._lock:
            del self._open[kept]

    def begin(self) -> None:
        """Before a call: completes work left by others, the first time and as long as some is left."""
        if self._pid != os.getpid():  # work in progress in the parent of a fork is not ours, nor is its lock
            self._pid, self._lock, self._open, self._due = os.getpid(), threading.Lock(), {}, {}
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look()

    def abort(self) -> None:
        """After a call of this thread that raised: what it owes the sink becomes due."""
        with self._lock:
            mine = [name for name, (thread, _) in self._open.items() if thread == threading.get_ident()]
        for name in mine:
            self._stays_due(name, self._open[name][1])

    def end(self, *, takeover: bool) -> None:
        """After a call: completes the work that is due, or warns the caller.

        `takeover`: an owner of one of its documents died or froze, and may have left an intent.
        """
        left, failed = self._work_off()
        if takeover:
            self._look()
        if left:
            doc_ids = {doc_id for touched in left.values() for doc_id in touched}
            behind = "1 document" if len(doc_ids) == 1 else f"{len(doc_ids):,} documents"
            why = repr(failed) if failed else "another process is writing them right now"
            self._warn(f"the sink is behind with {behind}, such as {min(doc_ids)!r}: {why}")

    def settle(
        self,
        live: Callable[[], Iterable[LogRow]],
        history: Callable[[], Iterable[LogRow]],
        *,
        full: bool,
        foreign: Foreign = "keep",
    ) -> Settled:
        """Completes work left by any process; with `full`, compares all live documents with the sink.

        `history` returns every row of the log. What no row ever named was not written by ragfence.
        """
        done, left, failed = self._settle_intents()
        if failed:
            raise failed
        if not full:
            return Settled(done, left)
        compared = self._compare(live, history, delete_foreign=foreign == "delete")
        return replace(compared, intents=done, left=left + compared.left)

    def _owed_upserts(self, rows: Sequence[LogRow]) -> dict[str, Sequence[str]]:
        """The snippets of each document that the sink needs: new ones, or all if the metadata changed."""
        live = [row for row in rows if row.live]
        followed = [row for row in live if row.detail.before]
        # Under our lease the head does not move. If the lease is lost, the seal fails, and the sink is reconciled.
        held = self._fences.read([lookup_of(row.key[0], row.source) for row in followed]) if followed else []
        heads = {
            row.detail.doc_id: each.source.head
            for row, each in zip(followed, held, strict=True)
            if each.source and each.source.head and each.source.head.live
        }
        given = {row.detail.doc_id: self._given(row, heads.get(row.detail.doc_id)) for row in live}
        return {doc_id: ids for doc_id, ids in given.items() if ids}

    def _given(self, row: LogRow, head: Head | None) -> Sequence[str]:
        ids = snippet_texts(row.detail.ids)
        if head is None or head.record is None or head.metadata_hash != row.metadata_hash:
            return ids
        if row.detail.action == METADATA:  # a higher sequence, or a takeover: no data of a sink has changed
            return ()
        if getattr(self._sink, "keeps_positions", False):
            return ids
        known = frozenset(snippet_texts(ids_in(head.record.result)))
        return [each for each in ids if each not in known]

    def _work_off(self) -> tuple[dict[str, TouchedSnippets], Exception | None]:
        """Does the work that is due, and waits for documents that are being written, but not after an error."""
        with self._lock:
            left, self._due = self._due, {}
        pause_s, failed = 0.005, None
        give_up_at = time.monotonic() + self._wait_s
        while left:
            for name, touched in list(left.items()):
                try:
                    if waiting := self._reconciler.reconcile(touched):
                        left[name] = {doc_id: touched[doc_id] for doc_id in waiting}
                    else:
                        self._done(name)
                        del left[name]
                except Exception as error:  # noqa: BLE001  # of a sink or a store; the caller must get its receipts
                    failed = error
            if failed or time.monotonic() >= give_up_at:
                break
            self._sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 1.5, 0.25)
        with self._lock:
            self._due |= left
        return left, failed

    def _look(self) -> None:
        self._look_at = None  # one of many threads is enough
        try:
            _, left, failed = self._settle_intents()
        except RagfenceError as error:
            left, failed = 1, error
        if left:  # a process is working, or dead: known when its lease has expired
            self._look_at = time.monotonic() + self._lease_s
        if failed:
            self._warn(f"work left for the sink could not be completed: {failed!r}")

    def _settle_intents(self) -> tuple[int, int, Exception | None]:
        """(settled, left, the first error)"""
        done, left, failed = 0, 0, None
        for name in list(self._intents.names()):
            try:
                intent = self._intents.get(name)
                if intent is None:
                    continue
                self._remember(name, intent)
                if self._reconciler.reconcile(touched_snippets(intent)):
                    left += 1
                else:
                    self._done(name)
                    done += 1
            except Exception as error:  # noqa: BLE001  # one intent must not block the others
                left, failed = left + 1, failed or error
        return done, left, failed

    def _stays_due(self, name: str, intent: Intent) -> None:
        # Another process may have settled the intent already: a frozen process looks like a dead one.
        with contextlib.suppress(RagfenceError):
            self._intents.keep(name, intent)
        self._remember(name, intent)
        with self._lock:
            del self._open[name]
            self._due[name] = touched_snippets(intent)

    def _remember(self, name: str, intent: Intent) -> None:
        """Keeps the vectors that the batch of an intent embedded, in case its documents are sent again."""
        self._upserts.remember(address_in(name), [each for owed in intent.values() for each in owed.upserts])

    def _done(self, name: str) -> None:
        self._intents.delete(name)
        with self._lock:
            self._due.pop(name, None)

    def _compare(
        self,
        live: Callable[[], Iterable[LogRow]],
        history: Callable[[], Iterable[LogRow]],
        *,
        delete_foreign: bool,
    ) -> Settled:
        """Reads ids, intents and heads, in this order: a snippet that another process is adding meanwhile is in its
        intent, and once that is gone, the snippet is live."""
        listed = getattr(self._sink, "ids", None)
        held = set(listed(None)) if listed else set()
        due = self._owed()
        missing, waiting, orphans = 0, 0, held - due
        for page in _paged(live()):
            lacking: dict[str, frozenset[str]] = {}
            for row in page:
                ids = snippet_texts(row.detail.ids)
                orphans.difference_update(ids)
                if absent := frozenset(ids) - held - due:
                    lacking[row.detail.doc_id] = absent
            waiting += len(self._reconciler.reconcile(lacking))
            missing += sum(map(len, lacking.values()))
        # Others may have rows in the same collection: only snippets that the log once named are ours to delete.
        own = orphans if delete_foreign else named_in_log(orphans, history)
        if own:
            delete_all(self._sink, sorted(own))
            waiting += self._revived(own, live)
        return Settled(0, waiting, missing, len(own), len(orphans) - len(own))

    def _revived(self, deleted: set[str], live: Callable[[], Iterable[LogRow]]) -> int:
        """Reconciles documents that were revived before their snippets were deleted as orphans."""
        waiting = len(deleted & self._owed())
        for page in _paged(live()):
            back = {row.detail.doc_id: deleted.intersection(snippet_texts(row.detail.ids)) for row in page}
            waiting += len(self._reconciler.reconcile({doc_id: frozenset(ids) for doc_id, ids in back.items() if ids}))
        return waiting

    def _owed(self) -> set[str]:
        owed: set[str] = set()
        for name in list(self._intents.names()):
            for ids in touched_snippets(self._intents.get(name) or {}).values():
                owed |= ids
        return owed

    def _warn(self, text: str) -> None:
        warnings.warn(
            f"sink {self._sink.name!r}: {text}; the pending work is stored under {self._intents.root} and completed by "
            "a later call or by settle()",
            SinkPending,
            stacklevel=4,
        )


def _new_segment(address: Address, rows: Sequence[LogRow]) -> NewSegment:
    return NewSegment(address, [snippet_id for row in rows for snippet_id, _ in row.detail.fresh])


def _unreadable(doc_id: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"the snippets of document {doc_id!r} cannot be read",
        hint="a compaction may be in progress: try again; if the error persists, run `ragfence verify`",
    )


def named_in_log(ids: set[str], history: Callable[[], Iterable[LogRow]]) -> set[str]:
    """Returns the snippet_ids that a row of the log names, as live or dead."""
    left, found = set(ids), set[str]()
    for row in history() if left else ():
        for held in (row.detail.ids, row.detail.dead):
            own = left.intersection(snippet_texts(held))
            found |= own
            left -= own
        if not left:
            break
    return found


def _paged(rows: Iterable[LogRow]) -> Iterator[list[LogRow]]:
    left = iter(rows)
    while page := list(islice(left, BATCH)):
        yield page
