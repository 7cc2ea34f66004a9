"""Where a fence finds its stores and its policy when the caller does not say: the environment and `ragfence.yml`.

The one module of the core that reads anything. It loads pydantic and YAML only when there is a policy to read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragfence.core.text_files import UnreadableFile, read_regular_file, read_text_file
from ragfence.core.urls import show_url
from ragfence.errors import ContentSecretError, PolicyError

if TYPE_CHECKING:
    from ragfence.core.policy import ContentSecret, Policy
    from ragfence.core.webhook_policy import WebhookPolicy

POLICY_FILE = "ragfence.yml"
MAX_POLICY_BYTES = 256 * 1024
CONTENT_SECRET = "RAGFENCE_CONTENT_SECRET"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 4096


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """`RAGFENCE_STORE`, `RAGFENCE_OBJECTS`, `RAGFENCE_TENANT` and `RAGFENCE_POLICY`; an empty one is unset."""

    store: str | None = None
    objects: str | None = None
    tenant: str = "default"
    policy: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if environ is None else environ
        given = {name: env.get(f"RAGFENCE_{name.upper()}", "").strip() for name in cls.__slots__}
        return cls(**{name: value for name, value in given.items() if value})

    def __repr__(self) -> str:
        return repr_without_passwords(self)


def repr_without_passwords(settings: Any) -> str:
    """The repr of a dataclass that holds store URLs."""
    shown = {name.name: getattr(settings, name.name) for name in fields(settings)}
    for name in ("store", "objects"):
        if isinstance(shown.get(name), str):
            shown[name] = show_url(shown[name])
    return f"{type(settings).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def load_policy(path: str | os.PathLike[str] | None = None) -> Policy:
    """The policy of this file; without one, that of `ragfence.yml` in the working directory, or the defaults."""
    from ragfence.core.policy import Policy

    if path is None and not os.path.lexists(POLICY_FILE):
        return Policy()
    file = Path(POLICY_FILE if path is None else path).expanduser()
    try:
        return Policy.from_mapping(_read_yaml(file))
    except PolicyError as refused:
        if "file" in refused.details:
            raise
        raise _refusal(file, refused.message, refused.hint, **refused.details) from refused.__cause__


def load_secret(given: ContentSecret, tenant: str) -> bytes:
    """The secret of a tenant with `content_hash: hmac`, without white space around it. Raises `ContentSecretError`."""
    from ragfence.core.operations import encoded

    advice = "make one with `openssl rand -hex 32`, keep a copy of it outside the stores, and never change it"
    if given.file:
        # Encoded: the name of a tenant may come from a stranger, and must not lead into another folder.
        file = Path(given.file.replace("{tenant}", encoded(tenant))).expanduser()
        place = f"the file {file}"
        try:
            secret = read_regular_file(file, MAX_POLICY_BYTES).strip()
        except (OSError, UnreadableFile) as broken:
            reason = getattr(broken, "strerror", None) or str(broken) or type(broken).__name__
            raise ContentSecretError(
                f"The secret of tenant {tenant!r} cannot be read from {place}: {reason}",
                hint=f"correct content_secret.file in the policy; {advice}",
            ) from broken
    else:
        name = (given.env or CONTENT_SECRET).replace("{tenant}", encoded(tenant))
        place = f"the environment variable {name}"
        secret = os.environ.get(name, "").strip().encode("utf-8", "surrogateescape")
        if not secret:
            raise ContentSecretError(
                f"Tenant {tenant!r} has content_hash: hmac, and {place} is not set",
                hint=f"set it, or name another place as content_secret in the policy; {advice}",
            )
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        size = f"{len(secret)} bytes" if len(secret) <= MAX_SECRET_BYTES else f"more than {MAX_SECRET_BYTES} bytes"
        raise ContentSecretError(
            f"The secret of tenant {tenant!r} in {place} has {size}; it takes {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}",
            hint=advice,
        )
    return secret


class WebhookSecrets(NamedTuple):
    """What a webhook needs from outside the policy."""

    secrets: tuple[str, ...]
    verify_token: str = ""
    inbox_url: str = ""

    def __repr__(self) -> str:
        return f"WebhookSecrets({len(self.secrets)} secrets)"


def load_webhook_secrets(name: str, webhook: WebhookPolicy) -> WebhookSecrets:
    """The secrets of a webhook, and the URL of its inbox, from the environment and from files.

    Raises:
        PolicyError: One of them is missing or empty. A webhook without a secret would accept what anybody sends.
    """
    secrets = [_read_variable(name, variable) for variable in webhook.secret_env]
    for path in webhook.secret_file:
        file = Path(path).expanduser()
        try:
            secret = read_regular_file(file, MAX_SECRET_BYTES).decode().strip()
        except (OSError, ValueError, UnreadableFile) as broken:
            reason = getattr(broken, "strerror", None) or type(broken).__name__
            raise _webhook_refusal(name, f"its secret cannot be read from the file {file}: {reason}") from None
        if not secret:
            raise _webhook_refusal(name, f"the file {file} with its secret is empty")
        secrets.append(secret)
    return WebhookSecrets(
        tuple(secrets),
        _read_variable(name, webhook.verify_token_env) if webhook.verify_token_env else "",
        _read_variable(name, webhook.inbox_env) if webhook.mode == "inbox" else "",
    )


def _read_variable(webhook: str, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise _webhook_refusal(webhook, f"the environment variable {variable} is not set, or empty")
    return value


def _webhook_refusal(name: str, problem: str) -> PolicyError:
    return PolicyError(
        f"the webhook {name!r} cannot be served: {problem}",
        hint=f"set it, or correct webhooks.{name} in the policy; nothing is served without its secrets",
    )


def _read_yaml(file: Path) -> Mapping[str, Any]:
    import yaml

    from ragfence.core.yaml_files import YamlOutOfBounds, parse_yaml

    try:
        text = read_text_file(file, MAX_POLICY_BYTES)
    except FileNotFoundError:
        hint = "correct the path (RAGFENCE_POLICY), or remove it to use the defaults"
        raise _refusal(file, "there is no such policy file", hint) from None
    except UnreadableFile as refused:
        hint = f"a policy is a YAML file in UTF-8, of at most {MAX_POLICY_BYTES // 1024} KiB"
        raise _refusal(file, str(refused), hint) from refused
    except (OSError, ValueError) as broken:
        raise _refusal(file, f"cannot be read: {broken}", "a policy is a YAML file in UTF-8") from broken
    try:
        content = parse_yaml(text)
    except YamlOutOfBounds as refused:
        raise _refusal(file, f"line {refused.line}: {refused.problem}", refused.hint) from refused
    except yaml.MarkedYAMLError as broken:
        where = f" at line {broken.problem_mark.line + 1}" if broken.problem_mark else ""
        raise _refusal(file, f"not YAML{where}: {broken.problem}", "correct the file") from broken
    except yaml.YAMLError as broken:
        raise _refusal(file, f"not YAML: {broken}", "correct the file") from broken
    if content is None:  # nothing but comments
        return {}
    if not isinstance(content, Mapping):
        hint = "a policy is a mapping, for example `on_conflict: {status: 409}`"
        raise _refusal(file, f"holds a {type(content).__name__} instead of settings", hint)
    return content


def _refusal(file: Path, problem: str, hint: str, **details: Any) -> PolicyError:
    return PolicyError(f"{file}: {problem}", hint=hint, file=str(file), **details)
