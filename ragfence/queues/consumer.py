"""`Consumer`: messages that are delivered at least once, handled once.

receive   some messages
claim     the key of each; a duplicate is acknowledged, and answered with the receipt of the first
handle    your function, sync or async
seal      the outcome
ack       only now: a consumer that dies before this leaves the message to the next one, which finds it sealed
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol

from ragfence.core.backoff import Backoff
from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.engine.claim_block import ClaimBlock, is_about, is_final, is_not_started
from ragfence.engine.refusals import is_outage
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
    ValidationError,
)
from ragfence.queues.loop import ACK_DELAY_S, RETRY, UNUSABLE, Admit, MessageLoop, OnResult, Process, describe
from ragfence.queues.transport import Message, Transport

KIND: Final = "queue"
_log = logging.getLogger("ragfence.queues")

Handle = Callable[[Message], Any]
"""Sync, or async."""


class Claims(Protocol):
    """What consumers and webhooks need of a fence."""

    @property
    def tenant(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    def notify(self, event: object) -> None: ...
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


class Consumer(MessageLoop):
    """Handles the messages of a queue, each key once.

    A transient error gives the key back, and the message comes again after a random, growing delay. A `TerminalError`,
    or more than `max_attempts` deliveries, sends it to the dead letters with the reason.

    Args:
        fence: Where keys are claimed; or a function that returns the fence of a message's tenant.
        handle: Called with a message, at most once per key. What it returns is kept in the receipt, as JSON. May be
            async: then it runs in the event loop of `arun`, or in one of its own.
        key: The key of a message: a source_id, (source_id, revision), or an `Operation`. By default, the key that the
            sender gave it (`dedupe_key`), or else its `event_id`.
        sequence: An integer that orders the messages of a source; an older one is `stale`, and not handled.
        payload: What is compared between messages of the same key; the body, unless given.
        kind: The kind of operation, unless `key` returns an `Operation`.
        max_attempts: After how many deliveries a message that keeps failing is given up.
        workers: How many messages are handled at the same time.
        batch: How many messages are received at once.
        wait_s: How long to wait for the first of them.
        retry: The delays of a message that failed.
        on_result: Called when a message is done with.
        admit: How many messages of a tenant may be handled now, for example `Quotas(...).admit`. The others are put
            back for a while, and do not count as failed.

    >>> consumer = Consumer(fence, queue, handle, key=lambda message: message.body["id"])  # doctest: +SKIP
    >>> consumer.run()  # until SIGTERM  # doctest: +SKIP
    """

    def __init__(
        self,
        fence: Claims | Callable[[str], Claims],
        transport: Transport,
        handle: Handle,
        *,
        key: Callable[[Message], str | tuple[str, str] | Operation] = lambda message: (
            message.dedupe_key or message.event_id
        ),
        sequence: Callable[[Message], int] | None = None,
        payload: Callable[[Message], Any] = lambda message: message.body,
        kind: str = KIND,
        max_attempts: int = 5,
        workers: int = 1,
        batch: int = 10,
        wait_s: float = 5.0,
        retry: Backoff = RETRY,
        on_result: OnResult | None = None,
        admit: Admit | None = None,
    ) -> None:
        if workers < 1:
            raise ValidationError("workers must be at least 1")
        self._handle, self._key, self._sequence, self._payload = handle, key, sequence, payload
        self._kind, self._workers = kind, workers
        super().__init__(
            fence,
            transport,
            kind=kind,
            max_attempts=max_attempts,
            batch=batch,
            wait_s=wait_s,
            retry=retry,
            on_result=on_result,
            admit=admit,
        )

    @contextlib.contextmanager
    def _processing(self) -> Iterator[Process]:
        with ThreadPoolExecutor(self._workers, "ragfence-consumer") as pool:
            yield lambda messages: self._process_all(messages, pool)

    def _process_all(self, messages: Sequence[Message], pool: ThreadPoolExecutor) -> None:
        running: list[Future[None]] = [pool.submit(self._take, message) for message in messages]
        left: set[Future[None]] = set(running)
        while left:
            _, left = wait(left, timeout=ACK_DELAY_S)
            # While a slow message is being handled, those that are done need not wait for it.
            self._flush()
        for done in running:
            if (error := done.exception()) is not None:
                _log.error("a message could not be settled; it will be delivered again", exc_info=error)

    def _take(self, message: Message) -> None:
        if self._stopping.is_set():
            self._put_back(message, "returned", 0)
        else:
            self._process(message)

    def _process(self, message: Message) -> None:
        try:
            fence: Claims = self._fence_of(message)
            operation, payload = self._operation_of(message), self._payload(message)
            claim = fence.claim(
                operation,
                payload=payload,
                wait_s=0,
                verdict=True,
                event_id=message.event_id,
                correlation_id=message.dedupe_key,
                route=message.route or f"queue:{self._transport.name}",
            )
        except UNUSABLE as error:
            self._bury(message, f"the key of the message cannot be made: {error}")
            return
        except Exception as error:  # noqa: BLE001  # whatever the functions that were given raise
            self._after_a_failed_try(message, error, is_entered=False)
            return
        is_entered = False
        try:
            with claim:
                is_entered, self._outages = True, 0
                if claim.is_new:
                    seal(claim, self._call(message))
        except BaseException as error:  # noqa: BLE001  # whatever the handler raises; its key was given back or sealed
            if isinstance(error, FencedOut) and is_about(error, claim):
                self._after_a_lost_race(message, error)
            elif isinstance(error, SealUncertain) and is_about(error, claim):
                # The effect happened. The next delivery finds its commit, or is told so.
                self._again(message, "seal uncertain")
            elif is_not_started(error):
                self._put_back_in_flight(message)
            else:
                self._after_a_failed_try(message, error, is_entered=is_entered)
        else:
            self._after_a_claim(message, claim)

    def _call(self, message: Message) -> Any:
        result = self._handle(message)
        return self._wait_for(result) if inspect.isawaitable(result) else result

    def _after_a_claim(self, message: Message, claim: ClaimBlock) -> None:
        error = claim.error
        if error is None and claim.receipt.failed:
            failure: Mapping[str, Any] = claim.receipt.failure or {}
            self._bury(message, f"failed before: {failure.get('message', '')}", claim.receipt)
        elif error is None:
            self._acknowledge(message, str(claim.decision), claim.receipt)
        elif isinstance(error, Stale):
            self._acknowledge(message, "stale")
        elif isinstance(error, InFlight):
            self._put_back_in_flight(message)
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

    def _after_a_failed_try(self, message: Message, error: BaseException, *, is_entered: bool) -> None:
        if not is_entered and is_outage(error):
            self._after_an_outage(message, error)
        else:
            self._after_an_error(message, error)

    def _after_an_outage(self, message: Message, error: BaseException) -> None:
        """The fence store did not answer: nothing was claimed, and no message is to blame."""
        reason = describe(error)
        _log.warning("message %s is put back: %s", message.message_id, reason)
        self._postpone(message, reason)
        self._outages += 1

    def _after_an_error(self, message: Message, error: BaseException) -> None:
        if is_final(error):
            self._bury(message, f"{type(error).__name__}: {error.message}")
            return
        code = error.code if isinstance(error, RagfenceError) else type(error).__name__
        _log.warning("message %s failed (attempt %d): %s", message.message_id, message.attempt, code, exc_info=error)
        self._again(message, describe(error))

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


def seal(claim: ClaimBlock, result: Any) -> Receipt:
    """Seals what was handled. It happened: a result that no receipt can hold is left out, never raised."""
    try:
        return claim.seal(result=result)
    except (NotJson, ResultTooBig):
        return claim.seal(result=None)
