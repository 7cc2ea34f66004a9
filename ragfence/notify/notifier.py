"""`Notifier`: announces what ragfence did, at least once, in order per source.

    find      what the stores hold and the memory does not know as announced
    deliver   each event, in the order of its source; again, after a pause, if the receiver is not ready
    remember  in the object store, after the delivery

A notifier that is killed between delivering and remembering delivers again, with the same event ids. An event that the
receiver does not take holds up its own source, and no other; after `give_up_s` it is dropped. A receiver that takes
nothing at all stops the round: nothing is dropped because of an outage that ends in time.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ragfence.core.backoff import Backoff
from ragfence.engine.crash_points import reach
from ragfence.engine.signals import stop_at_signals
from ragfence.errors import ObjectsRequired, PolicyError, RagfenceError, TransientError
from ragfence.notify.announcements import Announcement
from ragfence.notify.feeds import (
    BuildFeed,
    DocumentFeed,
    Feed,
    LedgerFeed,
    PendingAnnouncement,
    catalog_feed,
    gate_feed,
)
from ragfence.notify.memory import NotifyMemory
from ragfence.notify.receivers import receiver_of
from ragfence.queues.transport import Transport

if TYPE_CHECKING:
    from ragfence.fence import Fence

NOTIFY_FOUND, NOTIFY_DELIVERED, NOTIFY_SAVED = "notify_found", "notify_delivered", "notify_saved"
NOTIFY_POINTS = (NOTIFY_FOUND, NOTIFY_DELIVERED, NOTIFY_SAVED)

LOCK_MS: Final = 60_000
SAVE_EVERY: Final = 100
SAVE_S: Final = 2.0
FAILURES_OF_AN_OUTAGE: Final = 3
"""So many sources in a row whose event was not taken: the receiver is down."""
MAX_HELD: Final = 1000
"""With more sources whose events are not taken, the round ends."""
GIVE_UP_S: Final = 72 * 3600.0
_log = logging.getLogger("ragfence.notify")


class NotifyReport(NamedTuple):
    """What one round did."""

    sent: int = 0
    failed: int = 0
    """Events that were not taken; they are tried again."""
    dropped: int = 0
    """Events that were given up."""
    busy: bool = False
    """Another notifier of this name is at work."""
    began: bool = False
    """The first round: what was there already counts as announced."""


class Notifier:
    """Announces what ragfence did.

    Args:
        fence: What to announce: its tenant. It needs an object store.
        to: A `WebhookReceiver`, a transport of `ragfence.queues`, or a function that is called with each
            `Announcement`. A `TerminalError` refuses an event, any other error is tried again.
        name: Each name has a memory of its own: one for each receiver.
        history: The first round also announces what happened before it.
        sample: One duplicate out of so many is announced; 0 for none.
        types: Only these types of events; by default, all.
        drain_s: How often decisions are drained into the ledger, where this reads them. 0: somebody else does it.
        give_up_s: After this time, an event that its receiver does not take is dropped.
        retry: How often one event is tried in a round, and the pauses.

    >>> Notifier(fence, to=print).run_once()  # doctest: +SKIP
    NotifyReport(sent=3, failed=0, dropped=0, busy=False, began=False)
    """

    def __init__(
        self,
        fence: Fence,
        *,
        to: Transport | Callable[[Announcement], Any],
        name: str = "default",
        history: bool = False,
        sample: int = 100,
        types: tuple[str, ...] = (),
        drain_s: float | None = None,
        give_up_s: float = GIVE_UP_S,
        poll_s: float = 2.0,
        retry: Backoff = Backoff(attempts=4, first_s=0.5, longest_s=30.0),  # noqa: B008  # frozen
    ) -> None:
        objects = fence.inspector.objects
        if objects is None:
            raise ObjectsRequired("notify needs an object store, and this fence was opened without one")
        if sample < 0 or give_up_s <= 0:
            raise PolicyError("sample must not be negative, and give_up_s must be above 0")
        self._fence, self._fences, self._send = fence, fence.inspector.fences, receiver_of(to)
        self._lock_name, self._token = f"notify:{name}", secrets.token_hex(8)
        self._history, self._types = history, frozenset(types)
        self._drain_s = fence.policy.audit.drain_every_s if drain_s is None else drain_s
        self._give_up_ms, self._poll_s, self._retry = int(1000 * give_up_s), poll_s, retry
        self._dice = random.Random()
        self._stopping = threading.Event()
        self._drain_at = 0.0
        self.memory = NotifyMemory(fence.tenant, objects, name)
        self._stale = True
        tenant, memory = fence.tenant, self.memory
        self._feeds: tuple[Feed, ...] = (
            DocumentFeed(tenant, objects, self._fences, memory),
            BuildFeed(tenant, objects, memory),
            gate_feed(tenant, objects, memory),
            catalog_feed(tenant, objects, memory),
            LedgerFeed(tenant, objects, memory, self._fences.now_ms, sample),
        )

    def run(self, on_round: Callable[[NotifyReport], None] = lambda report: None) -> None:
        """Announces until `stop()` is called, or until SIGTERM or SIGINT if this is the main thread."""
        failures = 0
        with stop_at_signals(self.stop):
            while not self._stopping.is_set():
                try:
                    report = self.run_once()
                except TransientError as error:
                    failures += 1
                    _log.warning("the stores cannot be read: %s", error.message)
                    self._stopping.wait(self._retry.pause_s(failures, None, self._dice))
                    continue
                on_round(report)
                failures = failures + 1 if report.failed else 0
                pause_s = self._retry.pause_s(failures, None, self._dice) if failures else 0.0
                self._stopping.wait(max(self._poll_s, pause_s))

    def stop(self) -> None:
        """Ends `run` after the event that is being sent. May be called from any thread."""
        self._stopping.set()

    def run_once(self) -> NotifyReport:
        """Announces what happened until now."""
        if not self._hold_lock():
            self._stale = True  # the other one remembers more than we do
            return NotifyReport(busy=True)
        try:
            if self._stale:
                self.memory.load()
                self._stale = False
            self._drain()
            if self.memory.is_new and not self._history:
                return self._begin()
            return self._round()
        except BaseException:
            self._stale = True
            raise
        finally:
            with contextlib.suppress(TransientError):
                self._fences.unlock(self._lock_name, self._token)

    def _begin(self) -> NotifyReport:
        for feed in self._feeds:
            for _ in feed.pending(skip=True):
                pass
            feed.settle(set())
        if self.memory.state.epoch < 0:  # an epoch is beginning: what it holds is not known yet
            self._stale = True
            return NotifyReport()
        self._save()
        return NotifyReport(began=True)

    def _round(self) -> NotifyReport:
        sent = failed = dropped = in_a_row = since_save = 0
        saved_at = time.monotonic()
        blocked: set[str] = set()
        down = False
        for feed in self._feeds:
            undelivered: set[str] = set()
            for pending in feed.pending():
                one = pending.announcement
                reach(NOTIFY_FOUND)
                if self._types and one.type not in self._types:
                    pending.delivered()
                    continue
                down = down or self._stopping.is_set()
                if down or one.source in blocked:
                    undelivered.add(one.event_id)
                    failed += 1
                    continue
                error = self._deliver(one)
                reach(NOTIFY_DELIVERED)
                if error is None:
                    sent, in_a_row = sent + 1, 0
                    self._mark(pending)
                elif self._give_up(one, error):
                    dropped += 1
                    self._mark(pending)
                    self.memory.drop()
                else:
                    failed, in_a_row = failed + 1, in_a_row + 1
                    undelivered.add(one.event_id)
                    blocked.add(one.source)
                    down = in_a_row >= FAILURES_OF_AN_OUTAGE or len(self.memory.state.held) >= MAX_HELD
                since_save += 1
                if since_save >= SAVE_EVERY or time.monotonic() - saved_at > SAVE_S:
                    since_save, saved_at = 0, time.monotonic()
                    if not (self._save() and self._hold_lock()):
                        return NotifyReport(sent, failed, dropped, busy=True)
            feed.settle(undelivered, tried=not down)
            if down:
                break
        return NotifyReport(sent, failed, dropped, busy=not self._save())

    def _mark(self, pending: PendingAnnouncement) -> None:
        pending.delivered()
        self.memory.release(pending.announcement.source)

    def _deliver(self, one: Announcement) -> Exception | None:
        """Sends an event, and again if the receiver is not ready. Returns why it was not taken."""
        for attempt in range(1, self._retry.attempts + 1):
            try:
                self._send(one)
            except Exception as error:  # noqa: BLE001  # whatever a receiver raises
                if isinstance(error, RagfenceError) and not isinstance(error, TransientError):
                    return error
                if attempt == self._retry.attempts or self._stopping.is_set():
                    return error
                asked_ms = getattr(error, "retry_after_ms", None) if isinstance(error, RagfenceError) else None
                asked_s = None if asked_ms is None else asked_ms / 1000
                self._stopping.wait(self._retry.pause_s(attempt, asked_s, self._dice))
            else:
                return None
        return None

    def _give_up(self, one: Announcement, error: Exception) -> bool:
        now_ms = self._fences.now_ms()
        since_ms = self.memory.hold(one.source, now_ms)
        reason = error.message if isinstance(error, RagfenceError) else f"{type(error).__name__}: {error}"
        over = now_ms - since_ms > self._give_up_ms
        what = "was given up" if over else "was not taken, and holds up its source"
        _log.warning("event %s (%s) %s: %s", one.event_id, one.type, what, reason)
        return over

    def _drain(self) -> None:
        """Moves decisions to where the ledger's feed reads them."""
        if self._drain_s and time.monotonic() >= self._drain_at:
            self._drain_at = time.monotonic() + self._drain_s
            self._fence.audit.drain()

    def _save(self) -> bool:
        if not self.memory.save():
            self._stale = True
            _log.warning("another notifier of this name is at work")
            return False
        reach(NOTIFY_SAVED)
        return True

    def _hold_lock(self) -> bool:
        return self._fences.lock(self._lock_name, self._token, LOCK_MS)
