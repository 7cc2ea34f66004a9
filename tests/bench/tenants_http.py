"""HTTP/1.1 as the victim and the hostile tenant of part 7 speak it: no more than it takes."""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

HOST = "127.0.0.1"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CLOSED = re.compile(rb"\r\nconnection: *close\r\n", re.IGNORECASE)
_MOST = 1 << 20
"""bytes of headers: no answer has as many"""


class Reply(NamedTuple):
    status: int
    body: bytes
    closed: bool
    """the server will close the connection"""


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(port: int) -> Streams:
    return await asyncio.open_connection(HOST, port, limit=_MOST)


def head(method: str, path: str, port: int, token: str, *, key: str = "", length: int = 0) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {HOST}:{port}", f"authorization: Bearer {token}"]
    if key:
        lines += [f"idempotency-key: {key}", "content-type: application/json", f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def reply(reader: asyncio.StreamReader) -> Reply:
    top = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(top)
    if length is None:
        raise ConnectionError(f"an answer without a length: {top[:200]!r}")
    return Reply(int(top[9:12]), await reader.readexactly(int(length[1])), _CLOSED.search(top) is not None)
