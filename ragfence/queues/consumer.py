"""`Consumer`: messages that are delivered at least once, handled once.

    receive   some messages
    claim     the key of each; a duplicate is acknowledged, and answered with the receipt of the first
    handle    your function
    seal      the outcome
    ack       only now: a consumer that dies before this leaves the message to the next one, which finds it sealed

Everything that was received and not acknowledged is extended at a third of its visibility, whether it is claimed or
still waits for its turn.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol

from ragfence.core.backoff import Backoff
from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.engine.claim_block import ClaimBlock, is_final
from ragfence.errors import (
    Conflict,
    FencedOut,
    InFlight,
    NotJson,
    Quarantined,
    RagfenceError,
    ResultTooBig,
    SealUncertain,
    Stale,
    TransportUnavailable,
    ValidationError,
)
from ragfence.queues.transport import Message, Transport

KIND: Final = "queue"
_log = logging.getLogger("ragfence.queues")

Handle = Callable[[Message], Any]
OnResult = Callable[[Message, str, Receipt | None], None]
"""Called with each message, what became of it, and its receipt if there is one."""


class Claims(Protocol):
    """What consumers and webhooks need of a fence."""

    @property
    def tenant(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    def claim(
        self,
        operation: Operation,
        *,
        payload: object = None,
        wait_s: float | None = None,
        verdict: bool = False,
        event_id: str = "",
        correlation_id: str = "",
        route: str = "",
    ) -> ClaimBlock: ...


class Consumer:
    """Handles the messages of a queue, each key once.

    A transient error gives the key back, and the message comes again after a random, growing delay. A `TerminalError`,
    or more than `max_attempts` deliveries, sends it to the dead letters with the reason.

    Args:
        fence: Where keys are claimed; or a function that returns the fence of a message's tenant.
        handle: Called with a message, at most once per key. What it returns is kept in the receipt, as JSON.
        key: The key of a message: a source_id, (source_id, revision), or an `Operation`.
        sequence: An integer that orders the messages of a source; an older one is `stale`, and not handled.
        payload: What is compared between messages of the same key; the body, unless given.
        kind: The kind of operation, unless `key` returns an `Operation`.
        max_attempts: After how many deliveries a message that keeps failing is given up.
        workers: How many messages are handled at the same time.
        batch: How many messages are received at once.
        retry: The delays of a message that failed.
        on_result: Called when a message is done with.

    >>> consumer = Consumer(fence, queue, handle, key=lambda message: message.body["id"])  # doctest: +SKIP
    >>> consumer.run()  # until SIGTERM  # doctest: +SKIP
    """

    def __init__(
        self,
        fence: Claims | Callable[[str], Claims],
        transport: Transport,
        handle: Handle,
        *,
        key: Callable[[Message], str | tuple[str, str] | Operation],
        sequence: Callable[[Message], int] | None = None,
        payload: Callable[[Message], Any] = lambda message: message.body,
        kind: str = KIND,
        max_attempts: int = 5,
        workers: int = 1,
        batch: int = 10,
        wait_s: float = 5.0,
        retry: Backoff = Backoff(attempts=100, first_s=1.0, longest_s=300.0),  # noqa: B008  # frozen
        on_result: OnResult | None = None,
    ) -> None:
        if max_attempts < 1 or workers < 1 or batch < 1:
            raise ValidationError("max_attempts, workers and batch must be at least 1")
        self._fence, self._transport, self._handle = fence, transport, handle
        self._key, self._sequence, self._payload, self._kind = key, sequence, payload, kind
        self._max_attempts, self._workers, self._batch = max_attempts, workers, batch
        self._wait_s, self._retry, self._on_result = wait_s, retry, on_result
        self._stopping = threading.Event()
        self._held: dict[str, Message] = {}
        """Messages that were received and are not done with, by handle."""
        self._lock = threading.Lock()
        self._dice = random.Random()
        self.counts: Counter[str] = Counter()
        """What became of the messages so far: new, duplicate, stale, retried, dead, returned."""
        if not callable(fence):
            self._check_visibility(fence)

    def run(self) -> None:
        """Consumes until `stop()` is called, or until SIGTERM or SIGINT if this is the main thread.

        Then nothing more is received; what is being handled is finished, and the rest is given back.
        """
        with self._signals(), self._heartbeat(), ThreadPoolExecutor(self._workers, "ragfence-consumer") as pool:
            failures = 0
            while not self._stopping.is_set():
                try:
                    messages = self._transport.receive(self._batch, self._wait_s)
                    failures = 0
                except TransportUnavailable as error:
                    failures += 1
                    _log.warning("%s cannot be read: %s", self._transport.url, error.message)
                    self._stopping.wait(self._retry.pause_s(failures, None, self._dice))
                    continue
                self._consume(messages, pool)

    def run_once(self, wait_s: float = 0.0) -> int:
        """Receives once, and handles what came. Returns how many messages that were."""
        with self._heartbeat(), ThreadPoolExecutor(self._workers, "ragfence-consumer") as pool:
            messages = self._transport.receive(self._batch, wait_s)
            self._consume(messages, pool)
            return len(messages)

    def stop(self) -> None:
        """Ends `run` as soon as what is being handled is finished. May be called from any thread."""
        self._stopping.set()

    def _consume(self, messages: Sequence[Message], pool: ThreadPoolExecutor) -> None:
        with self._lock:
            self._held.update((message.handle, message) for message in messages)
        running: list[Future[None]] = [pool.submit(self._take, message) for message in messages]
        wait(running)
        for done in running:
            if (error := done.exception()) is not None:
                _log.error("a message could not be settled; it will be delivered again", exc_info=error)

    def _take(self, message: Message) -> None:
        try:
            if self._stopping.is_set():
                self._settle(message, "returned", None, lambda: self._transport.retry(message, 0, counted=False))
            else:
                self._process(message)
        finally:
            with self._lock:
                self._held.pop(message.handle, None)

    def _process(self, message: Message) -> None:
        try:
            fence = self._fence_of(message)
            operation, payload = self._operation_of(message), self._payload(message)
        except (ValidationError, LookupError, TypeError, AttributeError) as error:
            self._bury(message, f"the key of the message cannot be made: {error}")
            return
        claim = fence.claim(
            operation,
            payload=payload,
            wait_s=0,
            verdict=True,
            event_id=message.event_id,
            route=message.route or f"queue:{self._transport.name}",
        )
        try:
            with claim:
                if claim.is_new:
                    seal(claim, self._handle(message))
        except FencedOut as lost:
            self._after_a_lost_race(message, lost)
        except SealUncertain:
            # The effect happened. The next delivery finds its commit, or is told so.
            self._again(message, "seal uncertain")
        except Exception as error:  # noqa: BLE001  # whatever the handler raises; its key was given back or sealed
            self._after_an_error(message, error)
        else:
            self._after_a_claim(message, claim)

    def _after_a_claim(self, message: Message, claim: ClaimBlock) -> None:
        error = claim.error
        if error is None and claim.receipt.failed:
            failure: Mapping[str, Any] = claim.receipt.failure or {}
            self._bury(message, f"failed before: {failure.get('message', '')}", claim.receipt)
        elif error is None:
            self._acknowledge(message, str(claim.decision), claim.receipt)
        elif isinstance(error, Stale):
            self._acknowledge(message, "stale", None)
        elif isinstance(error, InFlight):
            # Not this message's fault, so it is not counted against it.
            delay_s = self._retry.pause_s(1, None, self._dice)
            self._settle(message, "in_flight", None, lambda: self._transport.retry(message, delay_s, counted=False))
        elif isinstance(error, Conflict | Quarantined):
            self._bury(message, f"{error.code}: {error.message}")
        else:
            raise error

    def _after_a_lost_race(self, message: Message, lost: FencedOut) -> None:
        winner: Receipt | None = lost.receipt
        if winner is None or winner.failed:
            self._again(message, lost.code)
        else:
            self._acknowledge(message, "duplicate", winner)

    def _after_an_error(self, message: Message, error: Exception) -> None:
        if is_final(error):
            self._bury(message, f"{type(error).__name__}: {error.message}")
            return
        code = error.code if isinstance(error, RagfenceError) else type(error).__name__
        _log.warning("message %s failed (attempt %d): %s", message.message_id, message.attempt, code, exc_info=error)
        self._again(message, f"{code}: {error.message if isinstance(error, RagfenceError) else error}")

    def _again(self, message: Message, reason: str) -> None:
        if message.attempt >= self._max_attempts:
            self._bury(message, f"given up after {message.attempt} attempts; the last: {reason}")
            return
        delay_s = self._retry.pause_s(message.attempt, None, self._dice)
        self._settle(message, "retried", None, lambda: self._transport.retry(message, delay_s))

    def _bury(self, message: Message, reason: str, receipt: Receipt | None = None) -> None:
        self._settle(message, "dead", receipt, lambda: self._transport.dead(message, reason))

    def _acknowledge(self, message: Message, decision: str, receipt: Receipt | None) -> None:
        self._settle(message, decision, receipt, lambda: self._transport.ack([message])[0])

    def _settle(self, message: Message, result: str, receipt: Receipt | None, act: Callable[[], bool]) -> None:
        try:
            if not act():
                _log.info("the delivery of message %s had expired; it may come again", message.message_id)
        except TransportUnavailable as error:
            _log.warning("message %s will be delivered again: %s", message.message_id, error.message)
        with self._lock:
            self.counts[result] += 1
        if self._on_result is not None:
            self._on_result(message, result, receipt)

    def _fence_of(self, message: Message) -> Claims:
        if not callable(self._fence):
            return self._fence
        fence = self._fence(message.tenant)
        self._check_visibility(fence)
        return fence

    def _operation_of(self, message: Message) -> Operation:
        key = self._key(message)
        if isinstance(key, Operation):
            return key
        source_id, revision = (key, "") if isinstance(key, str) else key
        sequence = None if self._sequence is None else self._sequence(message)
        return Operation(
            kind=self._kind,
            source_type=self._transport.name,
            source_id=source_id,
            revision=revision,
            sequence=sequence,
            index_hash=message.index_hash,
        )

    def _check_visibility(self, fence: Claims) -> None:
        lease_s = fence.policy.for_kind(self._kind).lease_ms / 1000
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
                    except TransportUnavailable as error:
                        _log.warning("messages cannot be extended: %s", error.message)

        keeper = threading.Thread(target=extend, name="ragfence-extend", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, lambda *_: self.stop()) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def seal(claim: ClaimBlock, result: Any) -> Receipt:
    """Seals what was handled. It happened: a result that no receipt can hold is left out, never raised."""
    try:
        return claim.seal(result=result)
    except (NotJson, ResultTooBig):
        return claim.seal(result=None)
