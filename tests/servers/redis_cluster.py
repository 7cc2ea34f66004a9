"""A cluster of primaries that share the 16384 slots, without replicas: what a node held is away until it is back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.daemons import HOST, folder_for, free_ports, started, wait_until
from tests.servers.redis_single import (
    RedisServer,
    TlsKind,
    login,
    redis62_binary,
    redis_server,
    valkey_binary,
)
from tests.servers.tls import Certificates, TlsProxy, certificates

SLOTS = 16_384


@dataclass(frozen=True, slots=True)
class RedisCluster:
    """Each node can be killed, frozen and started again by itself; it keeps its port, folder and slots."""

    nodes: tuple[RedisServer, ...]
    url: str
    """`redis+cluster://` with every node in it; `rediss+cluster://` behind TLS"""
    password: str | None = None
    certificates: Certificates | None = None
    proxies: tuple[TlsProxy, ...] = field(default=(), repr=False)

    def client(self, **more: Any) -> Any:
        """A redis-py client of the whole cluster; it follows what the nodes announce, which is TLS if there is any."""
        from redis.cluster import ClusterNode
        from redis.cluster import RedisCluster as Client

        ports = [proxy.port for proxy in self.proxies] or [node.port for node in self.nodes]
        if self.certificates is not None:
            shown = {"ssl_certfile": str(self.certificates.certfile), "ssl_keyfile": str(self.certificates.keyfile)}
            more = {"ssl": True, "ssl_ca_certs": str(self.certificates.ca), **shown, **more}
        return Client(startup_nodes=[ClusterNode(HOST, port) for port in ports], password=self.password, **more)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self._join()
        self.wait_whole()

    def end(self) -> None:
        for node in self.nodes:
            node.end()
        for proxy in self.proxies:
            proxy.close()

    def slots_of(self, node: RedisServer) -> range:
        """The slots that were given to the node when the cluster was made."""
        share = self.nodes.index(node), len(self.nodes)
        return range(SLOTS * share[0] // share[1], SLOTS * (share[0] + 1) // share[1])

    def owner_of(self, key: bytes | str) -> RedisServer:
        """The node that holds the key."""
        from redis.crc import key_slot

        slot = key_slot(key.encode() if isinstance(key, str) else key)
        return next(node for node in self.nodes if slot in self.slots_of(node))

    def wait_whole(self) -> None:
        """Until every node says that the cluster is well and knows of nobody who is not."""
        wait_until(lambda: all(self._finds_all_well(node) for node in self.nodes), f"{self.url} is whole")

    def wait_missed(self, away: RedisServer) -> None:
        """Until all others say that this node has failed."""
        others = [node for node in self.nodes if node is not away]
        wait_until(lambda: all(self._misses(node, away) for node in others), f"{away.url} is missed")

    def _join(self) -> None:
        for number, node in enumerate(self.nodes, start=1):
            with node.client() as client:
                # One by one, not as ranges: Redis 6.2 has no ADDSLOTSRANGE.
                client.execute_command("CLUSTER", "ADDSLOTS", *self.slots_of(node))
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number)
                for other in self.nodes[: number - 1]:
                    client.execute_command("CLUSTER", "MEET", other.host, other.port)

    def _finds_all_well(self, node: RedisServer) -> bool:
        with node.client() as client:
            told = client.execute_command("CLUSTER INFO")
            known = client.execute_command("CLUSTER NODES")
        return (
            told["cluster_state"] == "ok"
            and int(told["cluster_slots_ok"]) == SLOTS
            and len(known) == len(self.nodes)
            and not any("fail" in other["flags"] or "handshake" in other["flags"] for other in known.values())
            and all(other["connected"] for other in known.values())
        )

    def _misses(self, node: RedisServer, away: RedisServer) -> bool:
        with node.client() as client:
            known = client.execute_command("CLUSTER NODES")
        seen_as = {self._seen_port(away), away.port}
        return any(
            int(address.rpartition(":")[2]) in seen_as and "fail" in other["flags"].split(",")
            for address, other in known.items()
        )

    def _seen_port(self, node: RedisServer) -> int:
        return self.proxies[self.nodes.index(node)].port if self.proxies else node.port


@contextlib.contextmanager
def valkey_cluster(
    nodes: int = 3,
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    node_timeout_ms: int = 1000,
    full_coverage: bool = False,
    tls: TlsKind | None = None,
) -> Iterator[RedisCluster]:
    """Valkey primaries, each with an append-only file.

    `full_coverage` is Valkey's own default, under which nobody answers anything while a node is away; without it the
    slots of the others go on.
    """
    with _cluster(valkey_binary(), nodes, password, args, data_dir, node_timeout_ms, full_coverage, tls) as cluster:
        yield cluster


@contextlib.contextmanager
def redis62_cluster(
    nodes: int = 3,
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    node_timeout_ms: int = 1000,
    full_coverage: bool = False,
) -> Iterator[RedisCluster]:
    """The same with Redis 6.2."""
    with _cluster(redis62_binary(), nodes, password, args, data_dir, node_timeout_ms, full_coverage, None) as cluster:
        yield cluster


@contextlib.contextmanager
def _cluster(
    binary: Path,
    count: int,
    password: str | None,
    args: Sequence[str],
    data_dir: Path | None,
    node_timeout_ms: int,
    full_coverage: bool,
    tls: TlsKind | None,
) -> Iterator[RedisCluster]:
    common = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms)]
    common += ["--cluster-require-full-coverage", "yes" if full_coverage else "no"]
    common += ["--masterauth", password] if password else []

    def make() -> RedisCluster:
        ports = free_ports(count)
        context = pems.context(mutual=tls == "mutual") if pems else None
        proxies = [TlsProxy(port, context) for port in ports] if context else []
        shown = [proxy.port for proxy in proxies] or ports
        nodes = [
            redis_server(
                binary,
                port,
                folder / f"node-{port}",  # a second attempt must not find the cluster of the first
                password=password,
                args=[*common, *(["--cluster-announce-port", str(known_as)] if proxies else []), *args],
                appendonly=True,
            )
            for port, known_as in zip(ports, shown, strict=True)
        ]
        query = f"?{pems.query(client=tls == 'mutual')}" if pems else ""
        scheme = "rediss+cluster" if pems else "redis+cluster"
        url = f"{scheme}://{login(password)}{','.join(f'{HOST}:{port}' for port in shown)}{query}"
        return RedisCluster(tuple(nodes), url, password, pems, tuple(proxies))

    with folder_for(data_dir) as folder:
        pems = certificates(folder / "tls") if tls else None
        cluster: RedisCluster = started(make)
        try:
            yield cluster
        finally:
            cluster.end()
