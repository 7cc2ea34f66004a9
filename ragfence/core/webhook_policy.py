"""The section `webhooks` of a policy: how a webhook is verified, and which document its events hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ragfence.core.policy_section import HEADER_NAME, Names, PolicySection
from ragfence.core.webhook_format import Comparison, PayloadPath, check_signed_format
from ragfence.errors import PolicyError

WEBHOOK_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_VARIABLE: Final = re.compile(r"(?!whsec_)[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
"""The name of an environment variable; `whsec_` is how a secret itself begins."""


def _one_or_more(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


def _check_path(text: str) -> str:
    return PayloadPath.parse(text).text if text else text


def _check_variable(name: str) -> str:
    if name and not _VARIABLE.fullmatch(name):
        raise PolicyError("must be the name of an environment variable, never the value itself")
    return name


OneOrMore: TypeAlias = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_one_or_more)]
PathText: TypeAlias = Annotated[str, AfterValidator(_check_path)]
Variable: TypeAlias = Annotated[str, AfterValidator(_check_variable)]


class WebhookDocument(PolicySection):
    """Where a document stands in the payload of an event. Paths are `$.page.id`, `$.items[0]` or `$["any name"]`."""

    doc_id: PathText = Field(min_length=1)
    """path of the id: text or an integer"""
    text: PathText = Field(min_length=1)
    """path of the text"""
    doc_prefix: str = ""
    """put in front of every id, so that two webhooks never name the same document"""
    sequence: PathText = ""
    """path of what orders the revisions: an integer, or a time with its offset; an older event is stale"""
    source_url: PathText = ""
    """path of the address that citations show"""
    content_type: str = "text/plain"
    """the type of every text, such as `text/markdown`"""
    metadata: dict[str, PathText] = Field(default={})
    """fields of the metadata, and the path of each; what an event lacks is left out"""
    delete_when: str = ""
    """retracts the document if it holds: a path, `==`, `!=` or `in`, and a JSON value; false if the value is missing"""

    @field_validator("delete_when")
    @classmethod
    def _comparison(cls, text: str) -> str:
        if text:
            Comparison.parse(text)
        return text


class WebhookPolicy(PolicySection):
    """A webhook that `ragfence serve` receives at `/webhooks/NAME`. Secrets are never in the policy itself."""

    scheme: Literal["standard", "github", "meta", "stripe", "hmac"]
    """how the provider signs: Standard Webhooks, GitHub, Meta (WhatsApp), Stripe, or a plain HMAC"""
    document: WebhookDocument
    """what becomes of an event"""
    secret_env: OneOrMore = ()
    """environment variable with the secret; several while it is rotated"""
    secret_file: OneOrMore = ()
    """file with the secret; several while it is rotated"""
    verify_token_env: Variable = ""
    """`meta`: environment variable with the token of the GET challenge; without it, challenges are refused"""
    tenant: str = ""
    """the tenant of the documents; without it, that of the server (RAGFENCE_TENANT)"""
    mode: Literal["inline", "inbox"] = "inline"
    """`inline`: handled in the request; `inbox`: answered once it is in a queue, and handled by
    `ragfence webhooks consume`"""
    inbox_env: Variable = "RAGFENCE_INBOX"
    """`inbox`: environment variable with the URL of the queue"""
    events: Names = ("*",)
    """types of events that are handled; `*` and `?` match as in the shell; others are ignored"""
    tolerance_s: float = Field(default=300, gt=0, le=24 * 3600)
    """how far a signed timestamp may be from the clock of the server"""
    max_body_bytes: int = Field(default=1 << 20, ge=1, le=1 << 30)
    """limit for the body of a delivery"""
    event_id: PathText = ""
    """`hmac`: path of the id of an event; without it or `id_header`, a digest of the delivery"""
    type: PathText = "$.type"
    """`standard`, `hmac`: path of the type of an event"""
    header: str = ""
    """`hmac`: the header with the signature"""
    prefix: str = ""
    """`hmac`: what stands before the signature, such as `sha256=`"""
    algorithm: Literal["sha256", "sha384", "sha512", "sha1"] = "sha256"
    """`hmac`: the digest"""
    encoding: Literal["hex", "base64"] = "hex"
    """`hmac`: how the signature is written"""
    id_header: str = ""
    """`hmac`: the header with the id of an event"""
    timestamp_header: str = ""
    """`hmac`: the header with the time in seconds; it must be part of `signed`"""
    signed: str = "{body}"
    """`hmac`: what is signed: `{body}` and, if it is signed, `{id}` and `{timestamp}`"""

    @field_validator("secret_env")
    @classmethod
    def _variables(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_check_variable, names))

    @field_validator("header", "id_header", "timestamp_header")
    @classmethod
    def _header_name(cls, name: str) -> str:
        if name and not HEADER_NAME.fullmatch(name):
            raise PolicyError("is not the name of an HTTP header")
        return name

    @field_validator("events")
    @classmethod
    def _some_events(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        if not all(types) or not types:
            raise PolicyError("names no event", hint='leave it out for all of them, or name some: ["page.*"]')
        return types

    @model_validator(mode="after")
    def _fits_its_scheme(self) -> WebhookPolicy:
        if not any((*self.secret_env, *self.secret_file)) or not all((*self.secret_env, *self.secret_file)):
            raise PolicyError("has no secret", hint="secret_env: NAME, or secret_file: PATH")
        for name in sorted(self.model_fields_set & _OF_SCHEMES.keys()):
            if self.scheme not in _OF_SCHEMES[name]:
                raise PolicyError(f"{name} does not apply to scheme {self.scheme}; it is for {_OF_SCHEMES[name]}")
        if self.scheme == "hmac":
            if not self.header:
                raise PolicyError("scheme hmac needs the header with the signature", hint="header: X-Signature")
            check_signed_format(self.signed, id_header=self.id_header, timestamp_header=self.timestamp_header)
        if self.mode == "inbox" and not self.inbox_env:
            raise PolicyError("mode inbox needs inbox_env")
        return self


_OF_SCHEMES: Final[Mapping[str, str]] = {
    "verify_token_env": "meta",
    "type": "standard, hmac",
    "tolerance_s": "standard, stripe, hmac",
    **dict.fromkeys(
        ("event_id", "header", "prefix", "algorithm", "encoding", "id_header", "timestamp_header", "signed"), "hmac"
    ),
}
"""Settings of a webhook that only some schemes have."""
