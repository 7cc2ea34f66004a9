"""HTTP requests and answers as plain values: no framework, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ragfence.core.canonical import parse_json
from ragfence.core.hashing import digest
from ragfence.errors import RagfenceError

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names in lower case. A name may occur more than once."""

CONDITIONS: Final = ("if-match", "if-none-match")
"""Headers that change what a write does, or whether it does anything."""

_JSON_TYPE: Final = re.compile(
    r"\s*(?:application|text)/(?:[\w.!#$&^+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL
)


def headers_from(raw: Iterator[tuple[bytes, bytes]] | list[tuple[bytes, bytes]]) -> Headers:
    """Returns headers from a server. Latin-1 decodes every byte; values are checked where they are used."""
    return tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw)


def values_of(headers: Headers, name: str) -> list[str]:
    return [value.strip(" \t") for known, value in headers if known == name]


def first_of(headers: Headers, name: str) -> str:
    """Returns the first value of that name; empty if there is none."""
    return next((value.strip(" \t") for known, value in headers if known == name), "")


@dataclass(frozen=True, slots=True)
class Call:
    """A request. `route` is the template it was matched to (`/refunds/{id}`), `path` the path of its URL."""

    method: str
    path: str
    route: str = ""
    query: str = ""
    headers: Headers = ()
    body: bytes = b""
    root: str = ""
    """The prefix under which the application is mounted."""
    compared: object = None
    """What is compared instead of the body, if the route has parsed it."""
    kept: object = None
    """The part of `compared` that may be stored to show what differs, if not all of it."""

    def header(self, name: str) -> str:
        """Returns the first value of that name; empty if there is none."""
        return first_of(self.headers, name)

    @property
    def template(self) -> str:
        return self.route or self.path

    def payload(self) -> object:
        """Returns what is compared between two requests with the same key: method, path, query, conditions and body.

        JSON is compared as values, so the order of fields and white space do not matter, and a conflict can show what
        differs. Everything else, also compressed JSON, is compared byte for byte. Raises `NotJson`.
        """
        if self.compared is not None or self.is_json:
            return self._with(parse_json(self.body) if self.compared is None else self.compared)
        parts = (self.method.encode(), _bytes(self.path), _bytes(self.query), self.body)
        if conditions := self._conditions():
            named = (_bytes(f"{name}: {value}") for name, value in conditions.items())
            return digest("ragfence/http-request/2", *parts, *named)
        return digest("ragfence/http-request/1", *parts)

    def kept_payload(self) -> object:
        """Returns the part of the payload that may be stored; None: all of it."""
        return None if self.kept is None else self._with(self.kept)

    def _with(self, body: object) -> dict[str, object]:
        return {"method": self.method, "path": self.path, "query": self.query, "body": body, **self._conditions()}

    def _conditions(self) -> dict[str, str]:
        """Returns only those that are present, so that the payload of a request without any stays the same."""
        given = {name: ", ".join(values_of(self.headers, name)) for name in CONDITIONS}
        return {name: value for name, value in given.items() if value}

    @property
    def is_json(self) -> bool:
        # An empty body is not JSON, whatever type a client always sends.
        if not self.body or self.header("content-encoding").lower() not in ("", "identity"):
            return False
        return _JSON_TYPE.fullmatch(self.header("content-type")) is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. If it is longer than what is stored, `complete` is False and `body` is only its beginning."""

    status: int
    headers: Headers = ()
    body: bytes = b""
    complete: bool = True
    error: RagfenceError | None = field(default=None, compare=False, repr=False)
    """The error inside the server, if the answer is its problem."""

    def header(self, name: str) -> str:
        return first_of(self.headers, name)

    def with_headers(self, more: Mapping[str, str]) -> Answer:
        """Returns a copy with these headers, which replace those of the same name."""
        kept = tuple(pair for pair in self.headers if pair[0] not in more)
        return replace(self, headers=(*kept, *more.items()))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
