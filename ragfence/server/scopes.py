"""Scopes: what an API key may do, and which scopes each route requires.

`ROUTES` is the only place with the scopes of a route. The server checks it before any route is looked up, refuses to
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
    """One permission of an API key. A key has any set of scopes; none includes another."""

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
    # Every caller may query the state of its own requests: they are found by its principal, and the route requires the
    # scope of that request.
    ("GET", "/v1/idempotency"): _ANY_KEY,
    ("GET", "/v1/receipts/{key}"): frozenset({KeyScope.AUDIT}),
    ("GET", "/v1/decisions"): frozenset({KeyScope.AUDIT}),
    ("GET", "/v1/keys"): frozenset({KeyScope.AUDIT}),
    ("GET", "/v1/stats"): frozenset({KeyScope.AUDIT}),
    ("POST", "/v1/admin/keys/{key}:release"): frozenset({KeyScope.ADMIN}),
    ("POST", "/v1/admin/purge-expired"): frozenset({KeyScope.ADMIN}),
    ("POST", "/v1/admin/purge"): frozenset({KeyScope.ADMIN}),
}
"""(method, path) -> scopes, one of which a key must have"""


class _Pattern(NamedTuple):
    method: str
    path: re.Pattern[str]
    scopes: frozenset[KeyScope]


def _pattern(path: str) -> re.Pattern[str]:
    """Returns the pattern of the router: a parameter ends at a slash unless it is a path."""
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
    """Returns the scopes, one of which is required, for the path of a request. None if there is no such path.

    HEAD requires the scopes of GET. A method that the path does not accept requires any key: the router refuses it.
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
    """Returns all methods that a path accepts, for the header Allow.

    >>> allowed_methods("/v1/documents/a")
    ['DELETE', 'GET', 'HEAD', 'OPTIONS', 'PUT']
    """
    found = {each.method for each in _PATTERNS if each.path.fullmatch(path) is not None}
    return sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set()))


def check_listed(method: str, path: str) -> None:
    """Raises `RuntimeError` for a route without scopes: the server does not start with it."""
    if (method, path) not in ROUTES:
        raise RuntimeError(
            f"{method} {path} is not in ragfence.server.scopes.ROUTES, which names the scope it requires"
        )


def join_scopes(scopes: Iterable[KeyScope]) -> str:
    """Returns scopes as text, in the order in which they are documented.

    >>> join_scopes({KeyScope.AUDIT, KeyScope.SWAP})
    'swap or audit'
    """
    given = set(scopes)
    names = [scope.value for scope in KeyScope if scope in given]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def missing_scope(held: frozenset[KeyScope], needed: frozenset[KeyScope], what: str = "this request") -> Problem | None:
    """Returns the problem of a key that has none of the required scopes; None if it has one."""
    if held & needed:
        return None
    has = [scope.value for scope in KeyScope if scope in held]
    return refusal(
        "AUTH.forbidden",
        f"{what} needs the scope {join_scopes(needed)}; the API key has {', '.join(has)}",
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
