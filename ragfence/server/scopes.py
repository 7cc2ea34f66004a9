"""Scopes: what an API key may do, and which of them each route needs.

`ROUTES` is the only place that says what a route needs. The server checks it before any route is looked up, refuses to
start with a route that is not listed, and writes it into the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from ragfence.errors import ValidationError
from ragfence.wire.problems import Problem, refusal


class KeyScope(StrEnum):
    """One thing an API key may do. A key holds any set of them; none includes another."""

    INGEST = "ingest"
    RETRACT = "retract"
    BUILD = "build"
    SWAP = "swap"
    SEARCH = "search"
    AUDIT = "audit"
    ADMIN = "admin"


class Role(StrEnum):
    """A named set of scopes.

    >>> Role.READ.scopes == {KeyScope.SEARCH, KeyScope.AUDIT}
    True
    """

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @property
    def scopes(self) -> frozenset[KeyScope]:
        return _BUNDLES[self]


_READ: Final = frozenset({KeyScope.SEARCH, KeyScope.AUDIT})
_BUNDLES: Final = {
    Role.READ: _READ,
    Role.WRITE: _READ | {KeyScope.INGEST, KeyScope.RETRACT, KeyScope.BUILD, KeyScope.SWAP},
    Role.ADMIN: frozenset(KeyScope),
}

MEANINGS: Final[Mapping[KeyScope, str]] = {
    KeyScope.INGEST: "send documents",
    KeyScope.RETRACT: "retract documents",
    KeyScope.BUILD: "build indexes",
    KeyScope.SWAP: "point aliases at sealed builds that pass their gates, and roll back",
    KeyScope.SEARCH: "search, and read documents and snippets",
    KeyScope.AUDIT: "read decisions, receipts, keys and statistics",
    KeyScope.ADMIN: "release stuck keys, purge, and force an alias past a failed gate (with swap)",
}

_ANY_KEY: Final[frozenset[KeyScope]] = frozenset(KeyScope)
_INDEXES: Final = frozenset({KeyScope.SEARCH, KeyScope.BUILD, KeyScope.SWAP})

ROUTES: Final[Mapping[tuple[str, str], frozenset[KeyScope]]] = {
    ("POST", "/v1/documents"): frozenset({KeyScope.INGEST}),
    ("POST", "/v1/documents:batch"): frozenset({KeyScope.INGEST}),
    ("PUT", "/v1/documents/{doc_id:path}"): frozenset({KeyScope.INGEST}),
    ("DELETE", "/v1/documents/{doc_id:path}"): frozenset({KeyScope.RETRACT}),
    ("GET", "/v1/documents/{doc_id:path}"): frozenset({KeyScope.SEARCH}),
    ("POST", "/v1/builds"): frozenset({KeyScope.BUILD}),
    ("GET", "/v1/builds"): _INDEXES,
    ("GET", "/v1/builds/{index_hash}"): _INDEXES,
    ("POST", "/v1/aliases/{alias}:swap"): frozenset({KeyScope.SWAP}),
    ("POST", "/v1/aliases/{alias}:rollback"): frozenset({KeyScope.SWAP}),
    ("GET", "/v1/aliases"): _INDEXES,
    ("GET", "/v1/aliases/{alias}"): _INDEXES,
    ("GET", "/v1/aliases/{alias}/history"): frozenset({KeyScope.SWAP, KeyScope.AUDIT}),
    ("GET", "/v1/search"): frozenset({KeyScope.SEARCH}),
    # Whoever sent a request may ask how far it is: the answer is found by the caller's own principal, and the route
    # wants the scope of the request that is asked about.
    ("GET", "/v1/idempotency"): _ANY_KEY,
    ("GET", "/v1/receipts/{key}"): frozenset({KeyScope.AUDIT}),
    ("GET", "/v1/decisions"): frozenset({KeyScope.AUDIT}),
    ("GET", "/v1/keys"): frozenset({KeyScope.AUDIT}),
    ("GET", "/v1/stats"): frozenset({KeyScope.AUDIT}),
    ("POST", "/v1/admin/keys/{key}:release"): frozenset({KeyScope.ADMIN}),
    ("POST", "/v1/admin/purge-expired"): frozenset({KeyScope.ADMIN}),
    ("POST", "/v1/admin/purge"): frozenset({KeyScope.ADMIN}),
}
"""(method, path) -> the scopes of which a key must hold one"""


class _Pattern(NamedTuple):
    method: str
    path: re.Pattern[str]
    scopes: frozenset[KeyScope]


def _pattern(path: str) -> re.Pattern[str]:
    """As the router reads it: a parameter stops at a slash unless it is a path."""
    parts = re.split(r"(\{\w+(?::path)?\})", path)
    return re.compile(
        "".join(
            (".*" if part.endswith(":path}") else "[^/]+") if part.startswith("{") else re.escape(part)
            for part in parts
        ),
        re.DOTALL,
    )


_PATTERNS: Final = tuple(_Pattern(method, _pattern(path), scopes) for (method, path), scopes in ROUTES.items())


def scopes_for(method: str, path: str) -> frozenset[KeyScope] | None:
    """The scopes of which one is needed, for a path as it was requested. None if there is no such address.

    HEAD needs what GET needs. A method that the address does not take needs any key: the router refuses it.
    """
    known = False
    method = "GET" if method == "HEAD" else method
    for each in _PATTERNS:
        if each.path.fullmatch(path) is not None:
            if each.method == method:
                return each.scopes
            known = True
    return _ANY_KEY if known else None


def allowed_methods(path: str) -> list[str]:
    """All methods that the address takes, for the header Allow.

    >>> allowed_methods("/v1/documents/a")
    ['DELETE', 'GET', 'HEAD', 'OPTIONS', 'PUT']
    """
    found = {each.method for each in _PATTERNS if each.path.fullmatch(path) is not None}
    return sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set()))


def check_listed(method: str, path: str) -> None:
    """Raises for a route that says nowhere what it needs: the server does not start with it."""
    if (method, path) not in ROUTES:
        raise RuntimeError(f"{method} {path} is not in ragfence.server.scopes.ROUTES: nobody says which scope it needs")


def in_words(scopes: Iterable[KeyScope]) -> str:
    """`audit`, `swap or audit`, in the order in which they are documented.

    >>> in_words({KeyScope.AUDIT, KeyScope.SWAP})
    'swap or audit'
    """
    given = set(scopes)
    names = [scope.value for scope in KeyScope if scope in given]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def missing_scope(held: frozenset[KeyScope], needed: frozenset[KeyScope], what: str = "this request") -> Problem | None:
    """The problem of a key that holds none of the needed scopes; None if it holds one."""
    if held & needed:
        return None
    has = [scope.value for scope in KeyScope if scope in held]
    return refusal(
        "AUTH.forbidden",
        f"{what} needs the scope {in_words(needed)}; the API key has {', '.join(has)}",
        needed_scopes=[scope.value for scope in KeyScope if scope in needed],
        scopes=has,
    )


def scopes_named(names: Iterable[str]) -> frozenset[KeyScope]:
    """Raises `ValidationError` for a name that is not a scope, and for no name at all."""
    found = []
    for name in names:
        try:
            found.append(KeyScope(name))
        except ValueError:
            raise ValidationError(
                f"{str(name)[:40]!r} is not a valid scope", hint=f"one of {', '.join(KeyScope)}"
            ) from None
    if not found:
        raise ValidationError("an API key needs at least one scope", hint=f"one of {', '.join(KeyScope)}")
    return frozenset(found)
