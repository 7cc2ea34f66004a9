"""Deliveries to webhooks of a policy, signed as each provider documents it."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

SECRET = "a secret that is long enough"
STANDARD_SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()

DOCUMENT = {
    "doc_id": "$.page.id",
    "text": "$.page.body",
    "sequence": "$.page.version",
    "delete_when": '$.type == "page.deleted"',
}
SCHEMES: dict[str, dict[str, Any]] = {
    "standard": {"scheme": "standard"},
    "github": {"scheme": "github"},
    "meta": {"scheme": "meta"},
    "stripe": {"scheme": "stripe"},
    "hmac": {
        "scheme": "hmac",
        "header": "X-Signature",
        "timestamp_header": "X-Time",
        "signed": "{timestamp}.{body}",
        "event_id": "$.id",
    },
}
WITHOUT_TIMESTAMP = ("github", "meta")


def policy_of(name: str, **more: Any) -> dict[str, Any]:
    """A webhook of a scheme, named after it, whose secrets are in SECRET_<NAME>."""
    return {"secret_env": f"SECRET_{name.upper()}", "document": DOCUMENT} | SCHEMES[name] | more


def secret_of(name: str) -> str:
    return STANDARD_SECRET if name == "standard" else SECRET


def page(
    version: int, *, body: str = "", event_id: str = "", deleted: bool = False, doc_id: str = "p"
) -> dict[str, Any]:
    """An event of a CMS."""
    text = body or f"Leave is {version} days."
    kind = "page.deleted" if deleted else "page.updated"
    return {
        "id": event_id or f"e{version}",
        "type": kind,
        "page": {"id": doc_id, "version": version, "body": text},
    }


def signed(
    scheme: str, value: Any, *, secret: str = "", at: float | None = None, event_id: str = ""
) -> tuple[dict[str, str], bytes]:
    """The headers and the body of a delivery."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    secret, moment = secret or secret_of(scheme), str(int(time.time() if at is None else at))
    event_id = event_id or (value.get("id", "") if isinstance(value, dict) else "") or "msg_1"
    headers = {"content-type": "application/json"}
    if scheme == "standard":
        key = base64.b64decode(secret.removeprefix("whsec_"))
        digest = hmac.digest(key, f"{event_id}.{moment}.".encode() + body, "sha256")
        signature = "v1," + base64.b64encode(digest).decode()
        headers |= {"webhook-id": event_id, "webhook-timestamp": moment, "webhook-signature": signature}
    elif scheme == "stripe":
        digest = hmac.digest(secret.encode(), f"{moment}.".encode() + body, "sha256")
        headers["stripe-signature"] = f"t={moment},v1={digest.hex()}"
    elif scheme == "hmac":
        digest = hmac.digest(secret.encode(), f"{moment}.".encode() + body, "sha256")
        headers |= {"x-signature": digest.hex(), "x-time": moment}
    else:
        headers["x-hub-signature-256"] = "sha256=" + hmac.digest(secret.encode(), body, "sha256").hex()
        if scheme == "github":
            headers |= {"x-github-event": "page", "x-github-delivery": event_id}
    return headers, body


def meta_body(*values: dict[str, Any]) -> dict[str, Any]:
    """A body of Meta with several messages, each of which carries the page of an event."""
    messages = [{"id": value["id"], "type": "text", **value} for value in values]
    return {"entry": [{"id": "1", "changes": [{"field": "messages", "value": {"messages": messages}}]}]}


META_DOCUMENT = {
    "doc_id": "$.message.page.id",
    "text": "$.message.page.body",
    "sequence": "$.message.page.version",
}


def policy_of_all(**more: Any) -> dict[str, Any]:
    """One webhook for each scheme."""
    hooks = {name: policy_of(name, **more) for name in SCHEMES}
    hooks["meta"] |= {"document": META_DOCUMENT, "verify_token_env": "VERIFY_TOKEN"}
    return hooks


def delivery_of(scheme: str, event: dict[str, Any], **more: Any) -> tuple[dict[str, str], bytes]:
    """The delivery of an event, in the form of the scheme."""
    return signed(scheme, meta_body(event) if scheme == "meta" else event, event_id=event["id"], **more)
