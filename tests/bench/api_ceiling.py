"""A server that answers whatever comes with the same bytes: what is measured against it is the load itself.

stdout  {"port": 40123, "versions": {}} once it listens
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvloop

BODY = b'{"id":"0f1e2d3c","decision":"new"}'
ANSWER = b"HTTP/1.1 201 Created\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%s" % (len(BODY), BODY)
END = b'"}'
"""of every body; a request may come in two parts"""


class Answering(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(END):
            self._transport.write(ANSWER)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "versions": {}}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
