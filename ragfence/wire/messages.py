"""What was asked and what is answered over HTTP, as plain values: no framework, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ragfence.core.canonical import parse_json
from ragfence.core.hashing import digest
from ragfence.errors import RagfenceError

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""names in lower case; a name may stand there more than once"""

CONDITIONS: Final = ("if-match", "if-none-match")
"""headers under which a write does something else, or nothing"""

_JSON_TYPE: Final = re.compile(
    r"\s*(?:application|text)/(?:[\w.!#$&^+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL
)


def headers_from(raw: Iterator[tuple[bytes, bytes]] | list[tuple[bytes, bytes]]) -> Headers:
    """As a server hands them over. Latin-1 takes every byte; whether it may stand there is asked where it is used."""
    return tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw)


def values_of(headers: Headers, name: str) -> list[str]:
    return [value.strip(" \t") for known, value in headers if known == name]


def first_of(headers: Headers, name: str) -> str:
    """Empty if there is none of that name."""
    return next((value.strip(" \t") for known, value in headers if known == name), "")


@dataclass(frozen=True, slots=True)
class Call:
    """A request. `route` is the template it was matched to (`/refunds/{id}`), `path` what was asked for."""

    method: str
    path: str
    route: str = ""
    query: str = ""
    headers: Headers = ()
    body: bytes = b""
    root: str = ""
    """under which prefix the application is mounted"""
    compared: object = None
    """what is compared instead of the body, by a route that has read it"""
    kept: object = None
    """what of `compared` may be kept to tell what differs, if not all of it"""

    def header(self, name: str) -> str:
        """The first of that name; empty if there is none."""
        return first_of(self.headers, name)

    @property
    def template(self) -> str:
        return self.route or self.path

    def payload(self) -> object:
        """What is compared between two requests with the same key: method, path, query, conditions and body.

        JSON is compared by its meaning, so the order of fields and white space do not count, and a conflict can show
        what differs. Everything else, compressed JSON too, is compared byte for byte. Raises `NotJson`.
        """
        if self.compared is not None or self.is_json:
            return self._with(parse_json(self.body) if self.compared is None else self.compared)
        parts = (self.method.encode(), _bytes(self.path), _bytes(self.query), self.body)
        if conditions := self._conditions():
            named = (_bytes(f"{name}: {value}") for name, value in conditions.items())
            return digest("ragfence/http-request/2", *parts, *named)
        return digest("ragfence/http-request/1", *parts)

    def kept_payload(self) -> object:
        """None: all of the payload."""
        return None if self.kept is None else self._with(self.kept)

    def _with(self, body: object) -> dict[str, object]:
        return {"method": self.method, "path": self.path, "query": self.query, "body": body, **self._conditions()}

    def _conditions(self) -> dict[str, str]:
        """Only those that are there, so that a request without any is compared as it always was."""
        given = {name: ", ".join(values_of(self.headers, name)) for name in CONDITIONS}
        return {name: value for name, value in given.items() if value}

    @property
    def is_json(self) -> bool:
        # No body is no JSON, whatever a client always sends along as its type.
        if not self.body or self.header("content-encoding").lower() not in ("", "identity"):
            return False
        return _JSON_TYPE.fullmatch(self.header("content-type")) is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. `complete` is false for one that is longer than what is kept: `body` is only its beginning."""

    status: int
    headers: Headers = ()
    body: bytes = b""
    complete: bool = True
    error: RagfenceError | None = field(default=None, compare=False, repr=False)
    """what went wrong inside the server, where the answer is the problem of that"""

    def header(self, name: str) -> str:
        return first_of(self.headers, name)

    def with_headers(self, more: Mapping[str, str]) -> Answer:
        """Ours replace those of the same name."""
        kept = tuple(pair for pair in self.headers if pair[0] not in more)
        return replace(self, headers=(*kept, *more.items()))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
