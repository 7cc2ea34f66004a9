"""`MessageLoop`: receives messages, keeps them hidden while they are handled, and settles them.

Everything that was received and not settled is extended at a third of its visibility, whether it is being handled or
still waits for its turn. Messages are acknowledged together, in one call, and only after what they stand for is
sealed: a consumer that dies before that leaves them to the next one, which finds them sealed.

What became of a message:

    new, duplicate, stale    acknowledged
    retried                  failed, and comes again after a random, growing delay
    in_flight                put back: its key is being executed elsewhere. Not counted as an attempt
    throttled                put back: its tenant is over its quota. Not counted
    postponed                put back: a store did not answer. Not counted
    returned                 put back: the consumer was stopped. Not counted
    dead                     a dead letter, with the reason
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

from ragfence.core.backoff import Backoff
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.engine.aio import shield_until_done
from ragfence.engine.signals import stop_at_signals
from ragfence.errors import RagfenceError, TransportUnavailable, ValidationError
from ragfence.queues.transport import Message, Transport

ACK_DELAY_S: Final = 0.1
"""How long an acknowledgement waits for others at most."""
RETRY: Final = Backoff(attempts=100, first_s=1.0, longest_s=300.0)

UNUSABLE: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What is raised for a message from which nothing can be made, however often it is delivered. `ValidationError` is
a `ValueError`."""

_log = logging.getLogger("ragfence.queues")

OnResult = Callable[[Message, str, Receipt | None], None]
"""Called with each message, what became of it, and its receipt if there is one."""
Admit = Callable[[str, int], float]
"""Takes a tenant and a number of messages. Returns 0.0 if they may be handled now; otherwise the seconds to wait."""
Process = Callable[[Sequence[Message]], None]


class SettledMessage(NamedTuple):
    message: Message
    result: str
    receipt: Receipt | None = None
    reason: str = ""
    """why it was not acknowledged"""


class QueueStarted(NamedTuple):
    """An event: a consumer begins to receive from a queue."""

    transport: Transport


class QueueStopped(NamedTuple):
    """An event: a consumer has stopped. Sent before its transport is closed."""

    transport: Transport


class MessagesSettled(NamedTuple):
    """An event: what became of messages of one tenant."""

    queue: str
    url: str
    tenant: str
    settled: Sequence[SettledMessage]


class Listening(Protocol):
    """What the loop needs of a fence."""

    @property
    def tenant(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    def notify(self, event: object) -> None: ...


class MessageLoop(ABC):
    """What the consumers of messages share; see `Consumer` and `DocumentConsumer`."""

    def __init__(
        self,
        fence: Listening | Callable[[str], Listening],
        transport: Transport,
        *,
        kind: str,
        max_attempts: int,
        batch: int,
        wait_s: float,
        retry: Backoff,
        on_result: OnResult | None,
        admit: Admit | None,
    ) -> None:
        if max_attempts < 1 or batch < 1:
            raise ValidationError("max_attempts and batch must be at least 1")
        self._transport, self._lease_kind = transport, kind
        self._max_attempts, self._batch, self._wait_s = max_attempts, batch, wait_s
        self._retry, self._on_result, self._admit = retry, on_result, admit
        self._stopping = threading.Event()
        self._held: dict[str, Message] = {}
        """Messages that were received and are not settled, by handle."""
        self._sealed: list[SettledMessage] = []
        """Messages that are done, and not acknowledged yet."""
        self._lock = threading.Lock()
        self._dice = random.Random()
        self._outages = 0
        """How many batches in a row a store could not answer."""
        self._fences: dict[str, Listening] = {}
        self._one_fence = None if callable(fence) else fence
        self._fence_by_tenant = fence if callable(fence) else None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.counts: Counter[str] = Counter()
        """What became of the messages so far: new, duplicate, stale, retried, dead, returned."""
        if self._one_fence is not None:
            self._check_visibility(self._one_fence)

    def run(self, *, until_empty: bool = False, limit: int | None = None) -> None:
        """Consumes until `stop()` is called, or until SIGTERM or SIGINT if this is the main thread.

        Then nothing more is received; what is being handled is finished, and the rest is given back.

        Args:
            until_empty: Ends as soon as no message arrived within `wait_s`. Messages that wait for their next attempt
                are left to a later run.
            limit: Ends after so many messages were received.
        """
        with stop_at_signals(self.stop):
            self._run(until_empty, limit)

    async def arun(self, *, until_empty: bool = False, limit: int | None = None) -> None:
        """Like `run`, inside of an event loop: async handlers run in it. Signals are left to the program.

        If the task is cancelled, what is being handled is finished and the rest is given back first.

        >>> await consumer.arun()  # doctest: +SKIP
        """
        self._event_loop = loop = asyncio.get_running_loop()
        pool = ThreadPoolExecutor(1, "ragfence-consume")
        work = loop.run_in_executor(pool, self._run, until_empty, limit)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self.stop()
            await shield_until_done(work)
            raise
        finally:
            self._event_loop = None
            pool.shutdown(wait=False)  # waiting here would block the handlers, which run in this event loop

    def run_once(self, wait_s: float = 0.0) -> int:
        """Receives once, and handles what came. Returns how many messages that were."""
        with self._heartbeat(), self._processing() as process:
            messages = self._transport.receive(self._batch, wait_s)
            self._consume(messages, process)
            return len(messages)

    def stop(self) -> None:
        """Ends `run` as soon as what is being handled is finished. May be called from any thread."""
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called, or a signal ended the run."""
        return self._stopping.is_set()

    @abstractmethod
    def _processing(self) -> contextlib.AbstractContextManager[Process]:
        """Yields what handles a batch of messages, and settles each of them."""

    def _run(self, until_empty: bool, limit: int | None) -> None:
        self._notify_all(QueueStarted(self._transport))
        try:
            with self._heartbeat(), self._processing() as process:
                failures, left = 0, limit
                while not self._stopping.is_set() and left != 0:
                    try:
                        batch = self._batch if left is None else min(self._batch, left)
                        messages = self._transport.receive(batch, self._wait_s)
                        failures = 0
                    except TransportUnavailable as error:
                        failures += 1
                        _log.warning("%s cannot be read: %s", self._transport.url, error.message)
                        self._stopping.wait(self._retry.pause_s(failures, None, self._dice))
                        continue
                    if until_empty and not messages:
                        return
                    if left is not None:
                        left -= len(messages)
                    self._consume(messages, process)
                    if self._outages:
                        self._stopping.wait(self._retry.pause_s(self._outages, None, self._dice))
        finally:
            self._notify_all(QueueStopped(self._transport))

    def _consume(self, messages: Sequence[Message], process: Process) -> None:
        with self._lock:
            self._held.update((message.handle, message) for message in messages)
        try:
            if admitted := self._admitted(messages):
                process(admitted)
            self._flush()
        finally:
            with self._lock:
                for message in messages:
                    self._held.pop(message.handle, None)

    def _admitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Puts back what is over the quota of its tenant: the others need not wait for it."""
        if self._admit is None:
            return messages
        lanes: dict[str, list[Message]] = {}
        for message in messages:
            lanes.setdefault(self._tenant_of(message), []).append(message)
        admitted: list[Message] = []
        for tenant, lane in lanes.items():
            allowed, step, wait_s = 0, len(lane), 0.0
            while step and allowed < len(lane):
                step = min(step, len(lane) - allowed)
                refused_s = self._admit(tenant, step)
                if refused_s <= 0:
                    allowed += step
                else:
                    step, wait_s = step // 2, refused_s
            admitted += lane[:allowed]
            for message in lane[allowed:]:
                # Spread out: they would all come back at the same moment.
                self._put_back(message, "throttled", wait_s * self._dice.uniform(1.0, 2.0), "over the quota")
        return admitted

    def _acknowledge(self, message: Message, decision: str, receipt: Receipt | None = None) -> None:
        """Has the message acknowledged, together with others."""
        with self._lock:
            self._sealed.append(SettledMessage(message, decision, receipt))

    def _flush(self) -> None:
        with self._lock:
            done, self._sealed = self._sealed, []
        if not done:
            return
        try:
            kept = self._transport.ack([each.message for each in done])
            if lost := len(kept) - sum(kept):
                _log.info("%d of %d deliveries had expired; their messages may come again", lost, len(kept))
        except TransportUnavailable as error:
            _log.warning("%d messages will be delivered again: %s", len(done), error.message)
        self._settled(done)

    def _put_back(self, message: Message, result: str, delay_s: float, reason: str = "") -> None:
        """Gives a message back that is not to blame: this delivery is not counted."""
        self._settle(
            SettledMessage(message, result, None, reason),
            lambda: self._transport.retry(message, delay_s, counted=False),
        )

    def _put_back_in_flight(self, message: Message) -> None:
        self._put_back(message, "in_flight", self._retry.pause_s(1, None, self._dice), "in flight elsewhere")

    def _postpone(self, message: Message, reason: str) -> None:
        self._put_back(message, "postponed", self._retry.pause_s(self._outages + 1, None, self._dice), reason)

    def _again(self, message: Message, reason: str) -> None:
        """Has a message that failed delivered again, unless its attempts are used up."""
        if message.attempt >= self._max_attempts:
            self._bury(message, f"given up after {message.attempt} attempts; the last: {reason}")
            return
        delay_s = self._retry.pause_s(message.attempt, None, self._dice)
        settled = SettledMessage(message, "retried", None, reason)
        self._settle(settled, lambda: self._transport.retry(message, delay_s))

    def _bury(self, message: Message, reason: str, receipt: Receipt | None = None) -> None:
        # A message can put any text into the error that it causes. No queue may refuse it for that.
        reason = reason.encode(errors="backslashreplace").decode().replace("\0", "\\0")
        settled = SettledMessage(message, "dead", receipt, reason)
        self._settle(settled, lambda: self._transport.dead(message, reason))

    def _settle(self, settled: SettledMessage, act: Callable[[], bool]) -> None:
        try:
            if not act():
                _log.info("the delivery of message %s had expired; it may come again", settled.message.message_id)
        except TransportUnavailable as error:
            _log.warning("message %s will be delivered again: %s", settled.message.message_id, error.message)
        self._settled([settled])

    def _settled(self, settled: Sequence[SettledMessage]) -> None:
        with self._lock:
            for each in settled:
                self._held.pop(each.message.handle, None)
                self.counts[each.result] += 1
        by_tenant: dict[str, list[SettledMessage]] = {}
        for each in settled:
            by_tenant.setdefault(self._tenant_of(each.message), []).append(each)
        for tenant, own in by_tenant.items():
            fence = self._one_fence or self._fences.get(tenant) or next(iter(self._fences.values()), None)
            if fence is not None:
                fence.notify(MessagesSettled(self._transport.name, self._transport.url, tenant, own))
        if self._on_result is not None:
            for each in settled:
                try:
                    self._on_result(each.message, each.result, each.receipt)
                except Exception:  # noqa: BLE001  # the others are settled, too
                    _log.exception("on_result failed for message %s", each.message.message_id)

    def _notify_all(self, event: object) -> None:
        if self._one_fence is not None:
            self._one_fence.notify(event)
        elif isinstance(event, QueueStopped):
            for fence in self._fences.values():
                fence.notify(event)

    def _tenant_of(self, message: Message) -> str:
        return message.tenant or (self._one_fence.tenant if self._one_fence is not None else "")

    def _fence_of(self, message: Message) -> Any:
        """The fence of the message's tenant; typed by the consumer."""
        if self._one_fence is not None:
            return self._one_fence
        assert self._fence_by_tenant is not None
        fence = self._fence_by_tenant(message.tenant)
        if self._fences.get(message.tenant) is not fence:
            self._check_visibility(fence)
            self._fences[message.tenant] = fence
            fence.notify(QueueStarted(self._transport))
        return fence

    def _wait_for(self, result: Awaitable[Any]) -> Any:
        """The result of an async handler, which runs in the event loop of `arun`, or in one of the consumer's own."""
        with self._lock:
            if self._event_loop is None:
                self._event_loop = asyncio.new_event_loop()
                threading.Thread(target=self._event_loop.run_forever, name="ragfence-handlers", daemon=True).start()

        async def handled() -> Any:
            return await result

        # The context of this thread goes along, and with it the lease.
        return asyncio.run_coroutine_threadsafe(handled(), self._event_loop).result()

    def _check_visibility(self, fence: Listening) -> None:
        lease_s = fence.policy.for_kind(self._lease_kind).lease_ms / 1000
        if self._transport.visibility_s < lease_s:
            raise ValidationError(
                f"messages of {self._transport.name!r} are hidden for {self._transport.visibility_s:g} s, "
                f"less than a lease of {lease_s:g} s: others would get them while they are handled",
                hint=f"use a visibility of at least {lease_s:g} s, or set lease.ttl_s of the policy below it",
            )

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        ended = threading.Event()

        def extend() -> None:
            while not ended.wait(self._transport.visibility_s / 3):
                with self._lock:
                    held = list(self._held.values())
                if held:
                    try:
                        self._transport.extend(held)
                    except Exception as error:  # noqa: BLE001  # the next try may succeed, and nobody else extends them
                        _log.warning("messages cannot be extended: %s", describe(error))

        keeper = threading.Thread(target=extend, name="ragfence-extend", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()


def describe(error: BaseException) -> str:
    """An error as the reason of a dead letter: one line, with its code."""
    if isinstance(error, RagfenceError):
        return f"{error.code}: {error.message}"
    return f"{type(error).__name__}: {error}"
