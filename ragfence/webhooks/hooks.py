"""Handlers of webhooks: each event is fenced by its id, and ordered by its object where a sequence is given.

    verify    the signature, before anything else is read
    claim     the event's id: a delivery that was handled is answered with the first receipt
    order     the object's sequence: an event that is older than what was applied is stale, and not handled
    handle    your function, once
    seal      only then does the provider get its 2xx

With an inbox, the events of a verified delivery are put into a queue, the provider gets its 202 once they are durable
there, and a consumer does the rest.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from ragfence._extras import needs_extra
from ragfence.core.operations import Operation
from ragfence.core.receipts import Decision, Receipt
from ragfence.core.webhook_format import MISSING, PayloadPath
from ragfence.engine.aio import run_blocking
from ragfence.engine.claim_block import ClaimBlock, is_about, is_final, not_started
from ragfence.errors import (
    Conflict,
    FencedOut,
    InFlight,
    PolicyError,
    Quarantined,
    RagfenceError,
    Stale,
    TerminalError,
    ValidationError,
    WebhookUnverified,
)
from ragfence.queues.consumer import Claims, Consumer, seal
from ragfence.queues.transport import Envelope, Message, Transport
from ragfence.webhooks.providers import KIND, Provider, WebhookEvent
from ragfence.webhooks.signatures import Delivery

if TYPE_CHECKING:
    from fastapi import APIRouter

MAX_BODY_BYTES: Final = 1 << 20
RETRY_AFTER_S: Final = 5
ORDER_KIND: Final = "webhook.order"

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_log = logging.getLogger("ragfence.webhooks")

Handle = TypeVar("Handle", bound=Callable[..., Any])


class RunInThread(Protocol):
    """Calls a blocking function in a thread. A server passes one that bounds the threads of each tenant."""

    def __call__(self, call: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


class WebhookReply(NamedTuple):
    """What the provider is answered."""

    status: int
    body: Mapping[str, Any] | str
    headers: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class EventHandler:
    """A function that was registered for events."""

    function: Callable[[WebhookEvent], Any]
    provider: str
    type: str
    object_id: Callable[[WebhookEvent], Any] | None
    sequence: Callable[[WebhookEvent], Any] | None
    payload: Callable[[WebhookEvent], Any] | None = None

    def compared(self, event: WebhookEvent) -> Any:
        """What deliveries of one event must share, and what of them may be stored."""
        return event.payload if self.payload is None else self.payload(event)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def order(self, event: WebhookEvent) -> Operation | None:
        """The operation that orders the events of one object. None: they are not ordered."""
        if self.object_id is None or self.sequence is None:
            return None
        try:
            object_id, sequence = self.object_id(event), self.sequence(event)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValidationError(f"event {event.event_id} ({event.type}) has no object id or sequence") from error
        if object_id is None or sequence is None:  # without a sequence, it would be applied after newer events
            raise ValidationError(f"event {event.event_id} ({event.type}) has no object id or sequence")
        if isinstance(sequence, str) and _INTEGER.fullmatch(sequence):
            sequence = int(sequence)
        return Operation(
            kind=ORDER_KIND,
            source_type=event.provider,
            source_id=str(object_id),
            revision=event.event_id,
            sequence=sequence,
        )


@dataclass(slots=True)
class EventResult:
    """What came of one event."""

    event: WebhookEvent
    status: int
    decision: str
    receipt: Receipt | None = None
    error: RagfenceError | None = None

    def as_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"event_id": self.event.event_id, "type": self.event.type, "decision": self.decision}
        if self.receipt is not None:
            said |= {"key": self.receipt.key, "effect_id": self.receipt.effect_id, "result": self.receipt.result}
            if self.receipt.failed:
                said |= {"failure": self.receipt.failure}
        if self.error is not None:
            said |= {"code": self.error.code, "detail": self.error.message}
            if isinstance(self.error, Conflict):
                said |= {"diff": self.error.diff}
        return said


class Dispatch(NamedTuple):
    """The reply to a verified delivery, and what came of each of its events."""

    reply: WebhookReply
    results: tuple[EventResult, ...]
    """empty with an inbox, whose consumer handles the events"""


class Webhooks:
    """Receives the webhooks of several providers.

    Args:
        fence: Where events are fenced.
        providers: By the name that stands in the address: `/webhooks/<name>`.
        inbox: A queue that takes the events; a consumer handles them. Without one they are handled in the request.
        max_body_bytes: A longer body is refused before it is verified.
        run: Calls blocking functions in a thread.

    >>> hooks = Webhooks(fence, {"cms": StandardWebhooks("whsec_...")})  # doctest: +SKIP
    >>> @hooks.on("cms", "page.updated", object_id="page.id", sequence="page.version")  # doctest: +SKIP
    ... def page(event):
    ...     fence.documents.ingest(ragfence.Document(event["page"]["id"], event["page"]["body"]))
    """

    def __init__(
        self,
        fence: Claims,
        providers: Mapping[str, Provider],
        *,
        inbox: Transport | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        clock: Callable[[], float] = time.time,
        run: RunInThread = run_blocking,
    ) -> None:
        self._fence = fence
        self._providers = dict(providers)
        self._inbox = inbox
        self.max_body_bytes = max_body_bytes
        self._clock = clock
        self._run = run
        self._handlers: list[EventHandler] = []

    def on(
        self,
        provider: str,
        type: str = "*",
        *,
        object_id: str | Callable[[WebhookEvent], Any] | None = None,
        sequence: str | Callable[[WebhookEvent], Any] | None = None,
        payload: Callable[[WebhookEvent], Any] | None = None,
    ) -> Callable[[Handle], Handle]:
        """Registers a handler, sync or async, for the events of a provider. The first that matches is called.

        Args:
            type: The type of event; `*` and `?` match as in the shell.
            object_id: The object that the event is about: a path in the payload, or a function of the event.
            sequence: An integer that orders the events of an object. An older event is `stale`, and not handled.
            payload: What of an event is compared with its other deliveries, and may be stored for the diff of a
                conflict, if not all of it. A `ValidationError` of it refuses the event (422) before it is claimed.
        """
        if provider not in self._providers:
            known = ", ".join(sorted(self._providers)) or "none"
            raise PolicyError(f"unknown provider {provider!r}; known: {known}")
        if (object_id is None) != (sequence is None):
            raise PolicyError("object_id= and sequence= go together: a sequence orders the events of one object")

        def register(function: Handle) -> Handle:
            handler = EventHandler(function, provider, type, _reader(object_id), _reader(sequence), payload)
            self._handlers.append(handler)
            return function

        return register

    def challenge(self, name: str, query: Mapping[str, str]) -> WebhookReply:
        """The reply to the GET with which a provider checks the address."""
        provider = self._providers.get(name)
        if provider is None:
            return _unknown_provider(name)
        try:
            return WebhookReply(200, provider.challenge(query))
        except WebhookUnverified as error:
            return WebhookReply(403, _problem(error))

    def router(self, prefix: str = "/webhooks") -> APIRouter:
        """A router of FastAPI: `POST /webhooks/<provider>`, and the GET with which some providers check the address.

        >>> app.include_router(hooks.router())  # doctest: +SKIP
        """
        with needs_extra("api", "A router for webhooks"):
            from fastapi import APIRouter, Request
            from fastapi.responses import JSONResponse, PlainTextResponse, Response

        router = APIRouter(prefix=prefix, tags=["webhooks"])

        def response(reply: WebhookReply) -> Response:
            if isinstance(reply.body, str):
                return PlainTextResponse(reply.body, reply.status, dict(reply.headers))
            return JSONResponse(reply.body, reply.status, dict(reply.headers))

        # Not annotated: FastAPI would look for the names of this function in the module.
        async def receive(provider, request):  # type: ignore[no-untyped-def]
            body = bytearray()
            async for piece in request.stream():
                body += piece
                if len(body) > self.max_body_bytes:
                    break  # `receive` refuses it, and the rest is not read
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
            correlation_id = request.headers.get("x-correlation-id", "")[:200]
            return response(await self.receive(provider, headers, bytes(body), correlation_id=correlation_id))

        async def challenge(provider, request):  # type: ignore[no-untyped-def]
            return response(self.challenge(provider, request.query_params))

        for endpoint in (receive, challenge):
            endpoint.__annotations__ = {"provider": str, "request": Request}
        router.add_api_route("/{provider}", receive, methods=["POST"], response_model=None)
        router.add_api_route("/{provider}", challenge, methods=["GET"], response_model=None)
        return router

    def consumer(self, inbox: Transport | None = None, **options: Any) -> Consumer:
        """The consumer of the inbox: it handles the events that `receive` has put there.

        Args:
            inbox: The queue, unless it was given to the constructor.
            options: Those of `Consumer`, such as `max_attempts` and `workers`.
        """
        queue = inbox or self._inbox
        if queue is None:
            raise PolicyError("there is no inbox to consume", hint="Webhooks(..., inbox=open_transport(...))")
        return Consumer(
            self._fence,
            queue,
            lambda message: self.apply(event_of(message)),
            key=lambda message: event_of(message).operation,
            payload=lambda message: self.compared(event_of(message)),
            kind=KIND,
            **options,
        )

    async def receive(
        self, name: str, headers: Iterable[tuple[str, str]], body: bytes, *, correlation_id: str = ""
    ) -> WebhookReply:
        """The reply to a delivery, for any web framework: `router()` is this for FastAPI."""
        if len(body) > self.max_body_bytes:
            return WebhookReply(413, {"code": "VALIDATION.body_too_large", "detail": self._too_long()})
        try:
            events = self.read(name, headers, body)
        except WebhookUnverified as error:
            return WebhookReply(401, _problem(error))
        except ValidationError as error:
            return WebhookReply(400, _problem(error))
        if events is None:
            return _unknown_provider(name)
        return (await self.dispatch(name, events, correlation_id=correlation_id)).reply

    async def dispatch(self, name: str, events: list[WebhookEvent], *, correlation_id: str = "") -> Dispatch:
        """Handles the events of a verified delivery, or puts them into the inbox."""
        if self._inbox is not None:
            reply: WebhookReply = await self._run(self._enqueue, self._inbox, name, events)
            return Dispatch(reply, ())
        results = [await self._handle(event, correlation_id) for event in events]
        return Dispatch(_reply(results), tuple(results))

    def read(self, name: str, headers: Iterable[tuple[str, str]], body: bytes) -> list[WebhookEvent] | None:
        """The events of a delivery. None: no provider has this name.

        Raises:
            WebhookUnverified: nobody with a secret signed it.
            ValidationError: it is too long, or not what the provider sends.
        """
        provider = self._providers.get(name)
        if provider is None:
            return None
        if len(body) > self.max_body_bytes:
            raise ValidationError(self._too_long())
        delivery = Delivery.of(headers, body)
        verified = provider.verify(delivery, self._clock())
        return provider.events(name, delivery, verified)

    def apply(self, event: WebhookEvent) -> Any:
        """Calls the handler of an event, in the order of its object. For consumers; the event itself is fenced by them.

        Returns:
            What the handler returned, as far as a receipt can hold it; `{"decision": "stale"}` for an older event. If
            the handler is async, an awaitable of that.
        """
        handler = self.handler_of(event)
        if handler is None:
            return {"decision": "ignored"}
        if handler.is_async:
            return self._apply_async(handler, event)
        order = handler.order(event)
        if order is None:
            return storable(handler.function(event))
        with self._order(order, event) as claim:
            if claim.is_new:
                result = storable(handler.function(event))
                claim.seal(result=result)
                return result
        return _ordered(claim)

    def compared(self, event: WebhookEvent) -> Any:
        """What the deliveries of an event must share."""
        handler = self.handler_of(event)
        return event.payload if handler is None else handler.compared(event)

    def handler_of(self, event: WebhookEvent) -> EventHandler | None:
        for handler in self._handlers:
            if handler.provider == event.provider and fnmatchcase(event.type, handler.type):
                return handler
        return None

    def claim(self, event: WebhookEvent, correlation_id: str = "") -> ClaimBlock:
        """The claim of an event, by its id."""
        return self._fence.claim(
            event.operation,
            payload=self.compared(event),
            wait_s=0,
            verdict=True,
            event_id=event.event_id,
            correlation_id=correlation_id,
            route=f"webhooks/{event.provider}",
        )

    async def _handle(self, event: WebhookEvent, correlation_id: str) -> EventResult:
        handler = self.handler_of(event)
        if handler is None:
            return EventResult(event, 200, "ignored")
        claim: ClaimBlock | None = None
        try:
            claim = await self._run(self.claim, event, correlation_id)
            async with claim:
                if claim.is_new:
                    if handler.is_async:
                        result = await self._apply_async(handler, event)
                    else:
                        result = await self._run(self.apply, event)
                    await self._run(seal, claim, result)
        except FencedOut as lost:
            # Of another key, it says nothing about this event.
            if lost.receipt is None or claim is None or not is_about(lost, claim):
                return EventResult(event, 503, "in_flight", error=lost)
            return EventResult(event, 200, "duplicate", receipt=lost.receipt)
        except RagfenceError as error:
            if is_final(error):  # sealed as a failure: every later delivery gets the same answer
                return EventResult(event, 200, "failed", error=error)
            return _failure(event, error)
        except Exception:  # noqa: BLE001  # anything a handler raises: the key was given back, the provider tries again
            _log.exception("the handler of %s %s failed", event.provider, event.type)
            return EventResult(event, 500, "failed")
        return _result(event, claim)

    async def _apply_async(self, handler: EventHandler, event: WebhookEvent) -> Any:
        order = handler.order(event)
        if order is None:
            return storable(await handler.function(event))
        async with self._order(order, event) as claim:
            if claim.is_new:
                result = storable(await handler.function(event))
                await self._run(seal, claim, result)
                return result
        return _ordered(claim)

    def _too_long(self) -> str:
        return f"the body is longer than {self.max_body_bytes} bytes"

    def _order(self, order: Operation, event: WebhookEvent) -> ClaimBlock:
        return self._fence.claim(order, payload=event.payload, wait_s=0, verdict=True, event_id=event.event_id)

    def _enqueue(self, inbox: Transport, name: str, events: list[WebhookEvent]) -> WebhookReply:
        handled = [event for event in events if self.handler_of(event) is not None]
        try:
            for event in handled:
                self.compared(event)  # what can never be handled is refused now, and not accepted and then given up
        except ValidationError as error:
            return WebhookReply(422, _problem(error))
        envelopes = [
            Envelope(
                body={"provider": event.provider, "id": event.event_id, "type": event.type, "payload": event.payload},
                event_id=event.event_id,
                source_id=event.event_id,
                tenant=self._fence.tenant,
                route=f"webhooks/{name}",
            )
            for event in handled
        ]
        try:
            inbox.send(envelopes)
        except ValidationError as error:  # longer than a message may be: sending it again would not help
            return WebhookReply(413, _problem(error))
        except RagfenceError as error:
            return WebhookReply(503, _problem(error), {"retry-after": str(RETRY_AFTER_S)})
        return WebhookReply(202, {"accepted": len(envelopes)})


def event_of(message: Message) -> WebhookEvent:
    """The event that an inbox message carries."""
    body = message.body
    if not isinstance(body, Mapping) or not {"provider", "id", "type", "payload"} <= body.keys():
        raise ValidationError("the message is not a webhook event of an inbox")
    return WebhookEvent(str(body["provider"]), str(body["id"]), str(body["type"]), body["payload"])


def storable(result: Any) -> Any:
    """What of a handler's result goes into the receipt: a receipt of documents is shortened to its ids."""
    if isinstance(result, Receipt):
        return {"key": result.key, "decision": str(result.decision), "snippet_ids": list(result.snippet_ids)}
    return result


def _ordered(claim: ClaimBlock) -> Any:
    """The result of an event whose place in the order was decided before."""
    if isinstance(claim.error, Stale | Conflict):  # an outcome, too: asking again would not change it
        return {"decision": str(claim.decision), "detail": claim.error.message}
    if isinstance(busy := claim.error, InFlight):  # another event of the object is being handled
        raise not_started(busy) from busy
    if claim.error is not None:
        raise claim.error
    return claim.receipt.result


def _result(event: WebhookEvent, claim: ClaimBlock) -> EventResult:
    if claim.error is not None:
        return _failure(event, claim.error)
    receipt = claim.receipt
    ordered = receipt.result.get("decision") if isinstance(receipt.result, Mapping) else None
    if ordered == Decision.CONFLICT:
        return EventResult(event, 409, "conflict", receipt=receipt)
    decision = "stale" if ordered == Decision.STALE and claim.is_new else str(receipt.decision)
    return EventResult(event, 200, decision, receipt=receipt)


def _failure(event: WebhookEvent, error: RagfenceError) -> EventResult:
    """Never 2xx unless the outcome is sealed: the provider would not send the event again."""
    if isinstance(error, InFlight):
        return EventResult(event, 503, "in_flight", error=error)
    if isinstance(error, Conflict):
        return EventResult(event, 409, "conflict", error=error)
    if isinstance(error, Quarantined):
        return EventResult(event, 503, "in_flight", error=error)
    if isinstance(error, Stale):
        return EventResult(event, 200, "stale", error=error)
    if isinstance(error, ValidationError):
        return EventResult(event, 422, "failed", error=error)
    return EventResult(event, 500 if isinstance(error, TerminalError) else 503, "failed", error=error)


def _reply(results: list[EventResult]) -> WebhookReply:
    """One reply for all events of a body: the provider sends the whole body again unless it is 2xx."""
    worst = max((result.status for result in results), default=200)
    headers = {"retry-after": str(RETRY_AFTER_S)} if worst == 503 else {}
    return WebhookReply(worst, {"events": [result.as_json() for result in results]}, headers)


def _problem(error: RagfenceError) -> dict[str, Any]:
    return {"code": error.code, "detail": error.message, "hint": str(error.hint)}


def _unknown_provider(name: str) -> WebhookReply:
    return WebhookReply(404, {"code": "VALIDATION.webhook.provider", "detail": f"no provider {name[:64]!r} is set up"})


def _reader(path: str | Callable[[WebhookEvent], Any] | None) -> Callable[[WebhookEvent], Any] | None:
    if not isinstance(path, str):
        return path
    if path.startswith("$"):
        place = PayloadPath.parse(path)

        def find(event: WebhookEvent) -> Any:
            value = place.find(event.payload)
            if value is MISSING:
                raise LookupError(place.text)
            return value

        return find
    names = path.split(".")

    def read(event: WebhookEvent) -> Any:
        value = event.payload
        for name in names:
            value = value[name]
        return value

    return read
