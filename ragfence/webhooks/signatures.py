"""Signatures of webhooks: a delivery is verified before anything in it is read.

A scheme compares in constant time, accepts several secrets at once (so that they can be rotated), bounds what it reads
of headers, and refuses old deliveries where the provider signs a timestamp.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from ragfence.core.webhook_format import check_signed_format
from ragfence.errors import PolicyError, WebhookUnverified

TOLERANCE_S: Final = 300.0
MAX_HEADER_BYTES: Final = 4096
MAX_SIGNATURES: Final = 16
"""A provider that rotates its secrets signs with a few of them, not with hundreds."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One HTTP request of a provider.

    Args:
        headers: Names in lower case. A header that was sent twice is refused when it matters.
        body: The raw bytes, as they were signed.
    """

    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def of(cls, headers: Iterable[tuple[str, str]], body: bytes) -> Delivery:
        """A delivery from header pairs; values of a repeated header are joined by a comma, as HTTP says."""
        merged: dict[str, str] = {}
        for name, value in headers:
            name = name.lower()
            merged[name] = f"{merged[name]},{value}" if name in merged else value
        return cls(merged, body)

    def header(self, name: str) -> str:
        """The value of a header that must be there.

        Raises:
            WebhookUnverified: it is missing or too long.
        """
        value = self.headers.get(name, "").strip()
        if not value:
            raise WebhookUnverified(f"the header {name} is missing")
        if len(value) > MAX_HEADER_BYTES:
            raise WebhookUnverified(f"the header {name} is longer than {MAX_HEADER_BYTES} characters")
        return value


class SignedDelivery(NamedTuple):
    """What a signature vouches for."""

    event_id: str = ""
    """The provider's id of the event, if it is in a header."""
    timestamp: str = ""
    """The signed timestamp, if there is one."""
    signature: str = ""


class Scheme(Protocol):
    def verify(self, delivery: Delivery, now_s: float) -> SignedDelivery:
        """Raises `WebhookUnverified` unless one of the secrets signed the delivery."""
        ...


def secret_bytes(secrets: Sequence[str | bytes]) -> tuple[bytes, ...]:
    """Secrets as bytes.

    Raises:
        PolicyError: there is none, or one is empty. An empty secret would accept what anybody can sign.
    """
    found = tuple(secret.encode() if isinstance(secret, str) else secret for secret in secrets)
    if not found or not all(found):
        raise PolicyError("a webhook needs a secret that is not empty", hint="pass the secret that the provider shows")
    return found


def matches(expected: Iterable[bytes], given: Sequence[bytes]) -> bool:
    """Whether any signature that was given is one of those expected. The time does not depend on which."""
    found = False
    for one in expected:
        for other in given:
            found |= hmac.compare_digest(one, other)
    return found


def check_age(timestamp: str, now_s: float, tolerance_s: float) -> None:
    """Raises `WebhookUnverified` unless the timestamp (seconds) is within the tolerance, before or after now."""
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise WebhookUnverified("the timestamp of the delivery is not a number of seconds")
    if abs(now_s - int(timestamp)) > tolerance_s:
        raise WebhookUnverified(
            f"the delivery was signed more than {tolerance_s:g} s ago, or in the future",
            hint="check the clock of this machine; a provider signs each retry anew",
        )


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text) if text.isalnum() else b""
    except ValueError:
        return b""


class StandardSignature:
    """Signatures as in the Standard Webhooks specification: `webhook-id`, `webhook-timestamp`, `webhook-signature`.

    Args:
        secrets: `whsec_` and base64, as the provider shows them; several while they are rotated.
    """

    def __init__(self, *secrets: str, tolerance_s: float = TOLERANCE_S) -> None:
        decoded = []
        for secret in secrets:
            text = secret.removeprefix("whsec_")
            key = _base64(text + "=" * (-len(text) % 4))
            if not key:
                raise PolicyError("a secret of Standard Webhooks is `whsec_` and base64")
            decoded.append(key)
        self._secrets = secret_bytes(decoded)
        self._tolerance_s = tolerance_s

    def sign(self, event_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
        """The headers of a delivery of one's own, signed with each secret, so that the receiver can rotate as well."""
        signed = b"%b.%d.%b" % (event_id.encode(), timestamp_s, body)
        made = (base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in self._secrets)
        return {
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": " ".join(f"v1,{signature}" for signature in made),
        }

    def verify(self, delivery: Delivery, now_s: float) -> SignedDelivery:
        event_id = delivery.header("webhook-id")
        timestamp = delivery.header("webhook-timestamp")
        header = delivery.header("webhook-signature")
        given = [
            _base64(signature)
            for version, comma, signature in (one.partition(",") for one in header.split(" ")[:MAX_SIGNATURES])
            if comma and version == "v1"
        ]
        signed = b"%b.%b.%b" % (event_id.encode(), timestamp.encode(), delivery.body)
        if not matches((hmac.digest(secret, signed, "sha256") for secret in self._secrets), given):
            raise WebhookUnverified("no signature of the delivery was made with one of the secrets")
        check_age(timestamp, now_s, self._tolerance_s)
        return SignedDelivery(event_id, timestamp, header)


class StripeSignature:
    """Stripe's signatures: `Stripe-Signature: t=...,v1=...`."""

    def __init__(self, *secrets: str, tolerance_s: float = TOLERANCE_S) -> None:
        self._secrets = secret_bytes(secrets)
        self._tolerance_s = tolerance_s

    def verify(self, delivery: Delivery, now_s: float) -> SignedDelivery:
        header = delivery.header("stripe-signature")
        parts = [one.strip().partition("=") for one in header.split(",")[: MAX_SIGNATURES + 1]]
        timestamp = next((value for name, _, value in parts if name == "t"), "")
        given = [_hex(value) for name, _, value in parts if name == "v1"]
        signed = b"%b.%b" % (timestamp.encode(), delivery.body)
        if not matches((hmac.digest(secret, signed, "sha256") for secret in self._secrets), given):
            raise WebhookUnverified("no signature of the delivery was made with one of the secrets")
        check_age(timestamp, now_s, self._tolerance_s)
        return SignedDelivery("", timestamp, header)


class HmacSignature:
    """A plain HMAC of the body in a header of your choice.

    Args:
        secrets: Several while they are rotated.
        header: The header with the signature.
        prefix: What stands before the signature, such as `sha256=`.
        algorithm: A name that `hashlib` knows and that is safe for HMAC.
        encoding: How the signature is written.
        id_header: The header with the provider's id of the event, if there is one. It is trusted only as far as it is
            signed: see `signed`.
        timestamp_header: The header with the time in seconds. It is only checked if `signed` has it.
        signed: What is signed: a format of `{id}`, `{timestamp}` and `{body}`.

    >>> HmacSignature("secret", header="X-Hub-Signature-256", prefix="sha256=")  # doctest: +SKIP
    """

    def __init__(
        self,
        *secrets: str | bytes,
        header: str,
        prefix: str = "",
        algorithm: Literal["sha256", "sha384", "sha512", "sha1"] = "sha256",
        encoding: Literal["hex", "base64"] = "hex",
        id_header: str = "",
        timestamp_header: str = "",
        signed: str = "{body}",
        tolerance_s: float = TOLERANCE_S,
    ) -> None:
        if algorithm not in hashlib.algorithms_guaranteed:
            raise PolicyError(f"unknown algorithm {algorithm!r}", hint="use sha256")
        check_signed_format(signed, id_header=id_header, timestamp_header=timestamp_header)
        before, _, after = signed.partition("{body}")
        self._secrets = secret_bytes(secrets)
        self._header, self._prefix, self._algorithm = header.lower(), prefix, algorithm
        self._decode: Callable[[str], bytes] = _hex if encoding == "hex" else _base64
        self._id_header, self._timestamp_header = id_header.lower(), timestamp_header.lower()
        self._before, self._after, self._tolerance_s = before, after, tolerance_s

    def verify(self, delivery: Delivery, now_s: float) -> SignedDelivery:
        header = delivery.header(self._header)
        event_id = delivery.header(self._id_header) if self._id_header else ""
        timestamp = delivery.header(self._timestamp_header) if self._timestamp_header else ""
        given = [
            self._decode(one.strip()[len(self._prefix) :])
            for one in header.split(",")[:MAX_SIGNATURES]
            if one.strip().startswith(self._prefix)
        ]
        signed = self._fill(self._before, event_id, timestamp) + delivery.body
        signed += self._fill(self._after, event_id, timestamp)
        if not matches((hmac.digest(secret, signed, self._algorithm) for secret in self._secrets), given):
            raise WebhookUnverified("no signature of the delivery was made with one of the secrets")
        if timestamp:
            check_age(timestamp, now_s, self._tolerance_s)
        return SignedDelivery(event_id, timestamp, header)

    def _fill(self, text: str, event_id: str, timestamp: str) -> bytes:
        return text.replace("{id}", event_id).replace("{timestamp}", timestamp).encode()


class CustomSignature:
    """A check of your own: a callable that is given headers and body and says whether the delivery is genuine.

    Compare signatures with `hmac.compare_digest`.

    >>> CustomSignature(lambda headers, body: hmac.compare_digest(headers["x-token"], TOKEN))  # doctest: +SKIP
    """

    def __init__(self, check: Callable[[Mapping[str, str], bytes], bool], *, id_header: str = "") -> None:
        self._check = check
        self._id_header = id_header.lower()

    def verify(self, delivery: Delivery, now_s: float) -> SignedDelivery:
        if self._check(delivery.headers, delivery.body) is not True:  # a truthy mistake accepts nothing
            raise WebhookUnverified("the delivery did not pass the check of its signature")
        return SignedDelivery(delivery.header(self._id_header) if self._id_header else "")
