"""How often a call asks the server: counted on the wire."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import servers
from tests.bench.bulk import Bulk
from tests.bench.machine import redis_server
from tests.bench.peers.process import powertools
from tests.bench.scale import Scale
from tests.bench.single import guarded, request

CALLS = 50


class Turns(socketserver.ThreadingTCPServer):
    """A relay in front of a server that counts turns: the client speaks, then the server does.

    The server's own counters cannot tell: `total_commands_processed` has the commands inside a script as well, and a
    pipeline as many commands, though it is one trip. A turn on the wire is what a caller waits for.
    """

    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__((servers.HOST, 0), _Relay)
        self.upstream = upstream
        self.count = 0

    @property
    def url(self) -> str:
        return f"redis://{servers.HOST}:{self.server_address[1]}/0"

    def per_call(self, work: Callable[[], object], calls: int) -> float:
        before = self.count
        work()
        return (self.count - before) / calls


class _Relay(socketserver.BaseRequestHandler):
    server: Turns
    request: socket.socket

    def handle(self) -> None:
        with socket.create_connection(self.server.upstream) as upstream:
            client_speaks = False
            while True:
                for speaker in select.select([self.request, upstream], [], [])[0]:
                    data = speaker.recv(1 << 20)
                    if not data:
                        return
                    if speaker is self.request:
                        self.server.count += not client_speaks
                        client_speaks = True
                        upstream.sendall(data)
                    else:
                        client_speaks = False
                        self.request.sendall(data)


@contextlib.contextmanager
def relay(host: str, port: int) -> Iterator[Turns]:
    with Turns((host, port)) as turns:
        thread = threading.Thread(target=turns.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield turns
        finally:
            turns.shutdown()
            thread.join()


def measure(scale: Scale, peer: Path | None) -> dict[str, float]:
    measured = {}
    with redis_server() as server, relay(server.host, server.port) as turns:
        with guarded(turns.url, server.folder) as ours:
            sealed = request("replayed")
            ours.call(sealed)  # connects and loads the scripts
            measured["new"] = turns.per_call(lambda: ours.each(ours.fresh(CALLS)), CALLS)
            measured["replay"] = turns.per_call(lambda: ours.each([sealed] * CALLS), CALLS)
        with contextlib.closing(Bulk(turns.url)) as bulk:
            keys = bulk.keys(scale.batch)
            bulk.perform(bulk.claims(keys))
            # The least of some calls: while a request of many kilobytes is still on its way, the server may begin to
            # answer its first command, which looks like a turn. One too few is not possible.
            measured["bulk new"] = min(
                turns.per_call(lambda: bulk.perform(bulk.claims(bulk.keys(scale.batch))), 1) for _ in range(5)
            )
            measured["bulk replay"] = min(turns.per_call(lambda: bulk.replay(bulk.claims(keys)), 1) for _ in range(5))
        if peer is not None:
            with powertools(peer, turns.url) as other:
                measured["Powertools new"] = turns.per_call(lambda: other.seconds("new", CALLS, 0), CALLS)
                measured["Powertools replay"] = turns.per_call(lambda: other.seconds("replay", CALLS, 0), CALLS)
    return measured
