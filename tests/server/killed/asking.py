"""A client that sends a request until it is answered, and notes every answer it got on the way."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

JSON, NDJSON = "application/json", "application/x-ndjson"
MISMATCH, STALE, IN_FLIGHT = "CONFLICT.idempotency.payload_mismatch", "CONFLICT.sequence.stale", "IN_FLIGHT"
AGAIN = frozenset({202, 408, 429, 503, 504})
PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `wants` is what it does: to each document (or alias) the state it shall have; None: retracted."""

    method: str
    path: str
    key: str
    body: bytes = b""
    media_type: str = JSON
    wants: tuple[tuple[str, str | None], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    told: str = ""
    """Idempotency-Status"""
    retry_after: str = ""
    location: str = ""

    @property
    def code(self) -> str:
        if self.status < 400:
            return ""
        try:
            return str(json.loads(self.body)["code"])
        except (ValueError, KeyError, TypeError):
            return "?"

    @property
    def done(self) -> bool:
        """It is an outcome: what it says is so."""
        return self.status not in AGAIN and self.status < 500 and self.code != IN_FLIGHT


@dataclass(slots=True)
class Notes:
    """What one client has seen."""

    answers: list[tuple[Ask, Reply]] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    """what else it was told, and how often a connection was lost"""
    unavailable: list[float] = field(default_factory=list)
    """when it was told 503"""
    problems: list[str] = field(default_factory=list)


class Client:
    """One connection, kept alive. Not to be shared between threads."""

    def __init__(self, port: int, token: str, notes: Notes, *, pause_s: float = 0.05, honours: bool = False) -> None:
        """`honours`: Retry-After is waited for, as it should be; who has no time looks again sooner."""
        self._port, self._token, self._notes = port, token, notes
        self._pause_s, self._honours = pause_s, honours
        self._connection: http.client.HTTPConnection | None = None

    def answered(self, ask: Ask, *, stopped: Callable[[], bool] = lambda: False) -> Reply | None:
        """None: not within `PATIENCE_S`, which is noted as a problem, or before it was told to stop."""
        give_up_at = time.monotonic() + PATIENCE_S
        status_url = ""
        while time.monotonic() < give_up_at:
            if stopped():
                return None
            reply = self._sent("GET", status_url) if status_url else self._sent(ask.method, ask.path, ask)
            if reply is None:
                self._notes.met["lost"] += 1
                time.sleep(self._pause_s)
                continue
            if status_url and reply.status == 404:  # its runner is gone, and nobody performs it: send it again
                self._notes.met["status 404"] += 1
                status_url = ""
                continue
            if reply.done:
                self._notes.answers.append((ask, reply))
                return reply
            self._met(ask, reply)
            # Every other time it is asked for where it was told to; else it is sent again, as a retry does.
            status_url = "" if status_url else reply.location
            time.sleep(float(reply.retry_after or 1) if self._honours else self._pause_s)
        self._notes.problems.append(f"{ask.method} {ask.path} with key {ask.key} was never answered")
        return None

    def read(self, path: str) -> Any:
        """A GET, until it is answered."""
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            reply = self._sent("GET", path)
            if reply is not None and reply.status not in AGAIN:
                return json.loads(reply.body) if reply.status == 200 else None
            time.sleep(self._pause_s)
        raise TimeoutError(path)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _met(self, ask: Ask, reply: Reply) -> None:
        self._notes.met[f"{reply.status} {reply.code}".strip()] += 1
        if reply.status == 503:
            self._notes.unavailable.append(time.monotonic())
        if reply.status in (429, 503) and not reply.retry_after:
            self._notes.problems.append(f"{reply.status} without Retry-After: {reply.body[:300]!r}")
        if reply.status == 500:
            self._notes.problems.append(f"{ask.method} {ask.path} got 500: {reply.body[:300]!r}")

    def _sent(self, method: str, path: str, ask: Ask | None = None) -> Reply | None:
        """None: nobody knows what became of it."""
        headers = {"Authorization": f"Bearer {self._token}"}
        if ask is not None:
            headers |= {"Idempotency-Key": ask.key, **dict(ask.headers)}
            if ask.body:
                headers["Content-Type"] = ask.media_type
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60.0)
            self._connection.request(method, path, ask.body if ask else None, headers)
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self.close()
            return None
        if ask is not None and ask.media_type == NDJSON and answer.status == 200 and not _is_whole(body):
            self._notes.met["cut off"] += 1
            return None
        told = answer.headers
        return Reply(
            answer.status,
            body,
            told.get("Idempotency-Status", ""),
            told.get("Retry-After", ""),
            told.get("Location", "") if answer.status == 202 else "",
        )


def _is_whole(body: bytes) -> bool:
    """A batch says at its end that it is one."""
    return body.endswith(b"}\n") and b'"done":true' in body.rpartition(b"\n{")[2]
