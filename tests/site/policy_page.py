"""docs/policy.md, made from the pydantic model of the policy: `python -m tests.site.policy_page` writes it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ragfence.core.policy import KindPolicy, Policy, ProviderPolicy
from ragfence.core.policy_section import PolicySection
from ragfence.core.webhook_policy import WebhookPolicy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policy.md"

HEAD = """\
# Policy

<!-- Made from ragfence/core/policy.py by `python -m tests.site.policy_page`; do not edit. -->

This page lists every setting of a `ragfence.yml`. Every setting has a default, so a policy contains only what differs.

```yaml
# ragfence.yml
lease: {ttl_s: 60}
stores: {ttl: {api_hours: 72}}
documents: {chunk_size: 800, content_fields: [language]}
kinds:
  ticket: {class: api, max_attempts: 3}
providers:
  payments: {class: webhook, retry_horizon_hours: 72}
```

`RAGFENCE_POLICY` or `ragfence.open(policy=...)` names the file. Without either, a `ragfence.yml` in the working
directory is used. `ragfence policy check` validates a file and prints the effective settings. All problems of a file
are reported at once. Unknown settings are refused, and so are lifetimes that are shorter than the retries of their
senders. [Leases, waiting and lifetimes](tuning.md) explains the settings that depend on each other.
"""

KINDS = """\
Each entry is named after a kind.

Without `class`, kinds that start with `webhook` are of class `webhook`; `document` and `index` are of class `batch`;
all others are of class `api`. Some kinds have other defaults: a build (`index`) may run for 24 hours and is waited for
up to an hour, embedding (`vectors`) may run for 6 hours, and a request (`http`) may be tried 1000 times."""


WEBHOOKS = """\
Each entry is named after its address. [Webhooks](webhooks.md) has a whole example."""


def page() -> str:
    sections = [HEAD, "\n## General\n", _table(Policy, "", lambda field: not _model(field) and not _is_mapping(field))]
    for name, field in Policy.model_fields.items():
        if model := _model(field):
            sections.append(_section(name, model))
    sections.append(_section("kinds", KindPolicy, KINDS))
    sections.append(_section("providers", ProviderPolicy, "Each entry is named after a sender."))
    sections.append(_section("webhooks", WebhookPolicy, WEBHOOKS))
    return "".join(sections)


def settings() -> dict[str, str]:
    """What every setting of every section means, by `Section.setting`."""
    return {f"{model.__name__}.{name}": meaning for model in _models() for name, meaning in _meanings(model).items()}


def _models() -> list[type[BaseModel]]:
    return [Policy, *(each for each in PolicySection.__subclasses__() if each is not Policy)]


def _section(place: str, model: type[BaseModel], more: str = "") -> str:
    intro = inspect.cleandoc(model.__doc__ or "")
    text = f"\n## {place}\n\n{intro}{' ' if more else ''}{more}\n"
    text += _table(model, "", lambda field: not _model(field))
    for name, field in model.model_fields.items():
        if inner := _model(field):
            text += f"\n### {place}.{name}\n\n{inspect.cleandoc(inner.__doc__ or '')}\n"
            text += _table(inner, "", lambda _: True)
    return text


def _table(model: type[BaseModel], prefix: str, wanted: Any) -> str:
    meanings = _meanings(model)
    lines = ["", "| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if wanted(field):
            shown = field.alias or name
            lines.append(f"| `{prefix}{shown}` | {_default(field)} | {_allowed(name, field)} | {meanings[name]} |")
    return "\n".join(lines) + "\n"


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The text below each attribute, which Python itself does not keep."""
    (body,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(body, ast.ClassDef)
    meanings = dict.fromkeys(model.model_fields, "")
    for attribute, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(attribute, ast.AnnAssign) or not isinstance(attribute.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            meanings[attribute.target.id] = " ".join(text.value.value.split())
    return meanings


def _model(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict and field.default == {}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return f"`{value}`"
    if isinstance(value, tuple):
        return f"`{yaml.safe_dump(list(value), default_flow_style=True, width=10_000).strip()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _allowed(name: str, field: FieldInfo) -> str:
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal or any(get_origin(kind) is Literal for kind in kinds):
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else get_args(kinds[0])
        return ", ".join(f"`{choice}`" for choice in choices)
    if field.annotation is bool:
        return "`true`" if name == "reject_on_body_mismatch" else "`true`, `false`"
    limits = [*field.metadata, *(limit for kind in kinds for limit in getattr(kind, "__metadata__", ()))]
    limits += [part for limit in limits if isinstance(limit, FieldInfo) for part in limit.metadata]
    low = next((f"above {limit.gt:g}" for limit in limits if getattr(limit, "gt", None) is not None), "")
    low = low or next((f"{limit.ge:,}" for limit in limits if getattr(limit, "ge", None) is not None), "")
    high = next((f"{limit.le:,}" for limit in limits if getattr(limit, "le", None) is not None), "")
    if low or high:
        return f"{low} to {high}"
    if get_origin(field.annotation) is dict:
        return "a mapping of lists" if "tuple" in str(field.annotation) else "a mapping"
    return "a list" if "tuple" in str(field.annotation) else "text"


if __name__ == "__main__":
    PAGE.write_text(page())
