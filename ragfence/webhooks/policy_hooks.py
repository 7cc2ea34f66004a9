"""Webhooks that a policy describes: events become documents, without a line of code.

    load_hooks    the webhooks of a policy with their secrets, which come from the environment and from files
    bind          a webhook for a fence: a delivery is verified, and its document ingested or retracted
    Inboxes       the queues of the webhooks in mode `inbox`
    InboxWorker   handles what is in those queues

The head of a document orders its revisions, so an event that is older than the document is stale. Of an event only
digests of the content are stored with its key: a document that is purged leaves no text there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ragfence.core.canonical import canonical_json
from ragfence.core.document import CheckedDocument, Document
from ragfence.core.hashing import ContentKey, digest_part
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.core.settings import WebhookSecrets, load_webhook_secrets
from ragfence.core.webhook_format import MISSING, Comparison, PayloadPath, sequence_in
from ragfence.core.webhook_policy import WebhookDocument, WebhookPolicy
from ragfence.engine.aio import run_blocking
from ragfence.errors import Conflict, PolicyError, Stale, ValidationError
from ragfence.queues import open_transport
from ragfence.queues.consumer import Claims, Consumer
from ragfence.queues.transport import Message, Transport
from ragfence.webhooks.hooks import RunInThread, Webhooks, event_of, storable
from ragfence.webhooks.providers import KIND, GitHub, Meta, Provider, StandardWebhooks, Stripe, WebhookEvent
from ragfence.webhooks.signatures import HmacSignature


class DocumentCalls(Protocol):
    """What is needed of `fence.documents`."""

    def check(self, document: Document) -> CheckedDocument: ...
    def ingest(self, document: Document, *, event_id: str = "") -> Receipt: ...
    def retract(self, doc_id: str, *, sequence: int | None = None, event_id: str = "") -> Receipt: ...


class DocumentFence(Claims, Protocol):
    """What is needed of a fence."""

    @property
    def documents(self) -> DocumentCalls: ...


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """What an event says about a document."""

    document: Document
    """If it is deleted, only doc_id and sequence are known."""
    is_deletion: bool

    def digest(self, key: ContentKey | None) -> dict[str, Any]:
        """What is compared between the deliveries of an event, and stored: one digest of everything that is content.

        One for all of it, because a digest of a short field would confirm a guess.
        """
        doc = self.document
        if self.is_deletion:
            return {"action": "retract", "doc_id": doc.doc_id, "sequence": doc.sequence}
        content = canonical_json([doc.text, dict(doc.metadata), doc.source_url, doc.content_type])
        return {
            "action": "ingest",
            "doc_id": doc.doc_id,
            "sequence": doc.sequence,
            "content": digest_part(content, key),
        }


class DocumentMapping:
    """Turns the payload of an event into a document, as the policy says."""

    def __init__(self, rules: WebhookDocument) -> None:
        self._rules = rules
        self._doc_id, self._text = PayloadPath.parse(rules.doc_id), PayloadPath.parse(rules.text)
        self._sequence = PayloadPath.parse(rules.sequence) if rules.sequence else None
        self._source_url = PayloadPath.parse(rules.source_url) if rules.source_url else None
        self._metadata = {name: PayloadPath.parse(path) for name, path in rules.metadata.items()}
        self._delete_when = Comparison.parse(rules.delete_when) if rules.delete_when else None

    def change(self, payload: Any) -> DocumentChange:
        """Raises `ValidationError` if something that is needed is missing or of another type."""
        doc_id = self._rules.doc_prefix + self._doc_id.text_in(payload)
        sequence = None if self._sequence is None else sequence_in(self._sequence, payload)
        if self._delete_when is not None and self._delete_when.holds(payload):
            return DocumentChange(Document(doc_id, "", sequence=sequence), is_deletion=True)
        text = self._text.find(payload)
        if not isinstance(text, str):
            raise ValidationError(f"{self._text.text} of the document {doc_id!r} is not text")
        found = {name: path.find(payload) for name, path in self._metadata.items()}
        url = None if self._source_url is None else self._source_url.find(payload)
        document = Document(
            doc_id,
            text,
            {name: value for name, value in found.items() if value is not MISSING and value is not None},
            source_url=url if isinstance(url, str) else "",
            sequence=sequence,
            content_type=self._rules.content_type,
        )
        return DocumentChange(document, is_deletion=False)


@dataclass(frozen=True, slots=True)
class PolicyHook:
    """A webhook of a policy, with its secrets."""

    name: str
    tenant: str
    rules: WebhookPolicy
    provider: Provider = field(repr=False)
    mapping: DocumentMapping = field(repr=False)
    inbox_url: str = field(default="", repr=False)
    """Where its events wait; empty for mode `inline`."""

    def bind(
        self,
        fence: DocumentFence,
        *,
        content_key: ContentKey | None = None,
        inbox: Transport | None = None,
        run: RunInThread = run_blocking,
    ) -> Webhooks:
        """The webhook in front of a fence of its tenant."""
        hooks = Webhooks(
            fence, {self.name: self.provider}, inbox=inbox, max_body_bytes=self.rules.max_body_bytes, run=run
        )
        documents = fence.documents

        def compared(event: WebhookEvent) -> Any:
            change = self.mapping.change(event.payload)
            if not change.is_deletion:
                documents.check(change.document)
            return change.digest(content_key)

        for kind in self.rules.events:
            hooks.on(self.name, kind, payload=compared)(partial(apply_change, documents, self.mapping))
        return hooks


def apply_change(documents: DocumentCalls, mapping: DocumentMapping, event: WebhookEvent) -> Any:
    """Ingests or retracts the document of an event. A refusal that would come again is an outcome of the event."""
    change = mapping.change(event.payload)
    doc = change.document
    try:
        if change.is_deletion:
            receipt = documents.retract(doc.doc_id, sequence=doc.sequence, event_id=event.event_id)
        else:
            receipt = documents.ingest(doc, event_id=event.event_id)
    except Stale as refused:
        return {"decision": "stale", "doc_id": doc.doc_id, "detail": refused.message}
    except Conflict as refused:
        return {"decision": "conflict", "doc_id": doc.doc_id, "detail": refused.message, "diff": refused.diff}
    return {"doc_id": doc.doc_id, **storable(receipt)}


def load_hooks(policy: Policy, tenant: str) -> dict[str, PolicyHook]:
    """The webhooks of a policy, by name. `tenant`: of those that name none.

    Raises:
        PolicyError: A secret is missing, empty or malformed. All problems are named at once.
    """
    hooks: dict[str, PolicyHook] = {}
    problems: list[str] = []
    for name, rules in policy.webhooks.items():
        try:
            secrets = load_webhook_secrets(name, rules)
            provider = provider_of(rules, secrets)
        except PolicyError as refused:
            problems.append(refused.message if name in refused.message else f"the webhook {name!r}: {refused.message}")
            continue
        mapping = DocumentMapping(rules.document)
        hooks[name] = PolicyHook(name, rules.tenant or tenant, rules, provider, mapping, secrets.inbox_url)
    if problems:
        raise PolicyError(
            "; ".join(problems),
            hint="set what is missing, or take the webhook out of the policy: none is served without its secret",
            problems=tuple(problems),
        )
    return hooks


def provider_of(rules: WebhookPolicy, given: WebhookSecrets) -> Provider:
    """The provider that a policy describes."""
    match rules.scheme:
        case "standard":
            return StandardWebhooks(*given.secrets, type=rules.type, tolerance_s=rules.tolerance_s)
        case "stripe":
            return Stripe(*given.secrets, tolerance_s=rules.tolerance_s)
        case "github":
            return GitHub(*given.secrets)
        case "meta":
            return Meta(*given.secrets, verify_token=given.verify_token)
        case "hmac":
            signature = HmacSignature(
                *given.secrets,
                header=rules.header,
                prefix=rules.prefix,
                algorithm=rules.algorithm,
                encoding=rules.encoding,
                id_header=rules.id_header,
                timestamp_header=rules.timestamp_header,
                signed=rules.signed,
                tolerance_s=rules.tolerance_s,
            )
            return Provider(signature, event_id=rules.event_id, type=rules.type)


class Inboxes:
    """The queues of webhooks, opened when they are first needed."""

    def __init__(self, open_queue: Callable[[str], Transport] = open_transport) -> None:
        self._open_queue = open_queue
        self._open: dict[str, Transport] = {}
        self._lock = threading.Lock()

    def of(self, url: str) -> Transport:
        """Raises `TransportUnavailable` if the queue cannot be reached."""
        with self._lock:
            found = self._open.get(url)
            if found is None:
                found = self._open[url] = self._open_queue(url)
            return found

    def close(self) -> None:
        with self._lock:
            for queue in self._open.values():
                queue.close()
            self._open.clear()


class InboxWorker:
    """Handles the events that wait in the inbox of webhooks: each once, with retries and dead letters.

    Args:
        hooks: Webhooks that share one inbox.
        fences: The fence of each tenant that they name.
        queue: The inbox.
        options: Those of `Consumer`, such as `max_attempts` and `workers`.
    """

    def __init__(
        self,
        hooks: Mapping[str, PolicyHook],
        fences: Mapping[str, DocumentFence],
        queue: Transport,
        *,
        content_keys: Mapping[str, ContentKey | None] | None = None,
        **options: Any,
    ) -> None:
        keys = content_keys or {}
        self._bound = {
            (hook.tenant, name): hook.bind(fences[hook.tenant], content_key=keys.get(hook.tenant))
            for name, hook in hooks.items()
        }
        for tenant, fence in fences.items():
            lease_s = fence.policy.for_kind(KIND).lease_ms / 1000
            if queue.visibility_s < lease_s:
                raise ValidationError(
                    f"messages of the inbox {queue.name!r} are hidden for {queue.visibility_s:g} s, less than a lease "
                    f"of {lease_s:g} s of tenant {tenant!r}",
                    hint=f"use a visibility of at least {lease_s:g} s, or set lease.ttl_s of the policy below it",
                )
        self.consumer = Consumer(
            fences.__getitem__,
            queue,
            lambda message: self._hooks_of(message).apply(event_of(message)),
            key=lambda message: event_of(message).operation,
            payload=lambda message: self._hooks_of(message).compared(event_of(message)),
            kind=KIND,
            **options,
        )

    def run_until_empty(self) -> None:
        """Handles what waits in the inbox, and returns."""
        while self.consumer.run_once():
            pass

    def _hooks_of(self, message: Message) -> Webhooks:
        event = event_of(message)
        with contextlib.suppress(KeyError):
            return self._bound[message.tenant, event.provider]
        raise ValidationError(f"the policy has no webhook {event.provider!r} of tenant {message.tenant!r}")
