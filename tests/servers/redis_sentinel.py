"""A primary, its replica, and the sentinels that promote one when the other dies."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.daemons import HOST, Daemon, folder_for, free_ports, started, wait_until
from tests.servers.redis_single import RedisServer, TlsKind, login, redis_server, valkey_binary
from tests.servers.tls import Certificates, TlsProxy, certificates

# As production has them, a test would wait 8 s until a restarted primary is made a replica, and half a minute after
# every moment in which the machine was too busy for the sentinels' sense of time (TILT). While the primary is down a
# replica is asked once a second, and what it said is good for five ping periods: below 200 ms nobody is promotable.
_HURRY = {
    "info-period": 300,
    "ping-period": 400,
    "ask-period": 100,
    "publish-period": 150,
    "min-link-reconnect-period": 500,
    "slave-reconf-timeout": 1000,
    "tilt-period": 1000,
}


@dataclass(frozen=True, slots=True)
class SentinelPair:
    """Who is the primary changes; `primary()` and `replica()` ask. A killed primary that is started again comes back
    as one for a moment, as it would in production, until the sentinels make it a replica: see `wait_replicating`."""

    nodes: tuple[RedisServer, RedisServer]
    sentinels: tuple[RedisServer, ...]
    service: str
    url: str
    """`redis+sentinel://` with every sentinel in it; `rediss+sentinel://` behind TLS"""
    password: str | None = None
    certificates: Certificates | None = None
    proxies: dict[int, TlsProxy] = field(default_factory=dict, repr=False)
    """by the plain port behind each"""

    def start(self) -> None:
        for server in (*self.nodes, *self.sentinels):
            server.start()
        self.wait_replicating()

    def end(self) -> None:
        for server in (*self.sentinels, *self.nodes):
            server.end()
        for proxy in self.proxies.values():
            proxy.close()

    def primary(self) -> RedisServer:
        """Whom most sentinels call the primary, and who says so himself; waits while there is none."""
        found: RedisServer = wait_until(self._primary, f"{self.service} has a primary")
        return found

    def replica(self) -> RedisServer:
        primary = self.primary()
        return next(node for node in self.nodes if node is not primary)

    def wait_promoted(self, after: RedisServer) -> RedisServer:
        """Until somebody else than `after` is the primary."""

        def promoted() -> RedisServer | None:
            found = self._primary()
            return found if found is not after else None

        found: RedisServer = wait_until(promoted, f"{after.url} is replaced")
        return found

    def wait_replicating(self) -> None:
        """Until the replica has everything, and every sentinel knows the other sentinels, the primary and it.

        A primary that dies earlier than this has nobody who could take its place.
        """
        wait_until(self._replicating, f"{self.service} replicates")

    def cut_replication(self) -> RedisServer:
        """The replica, which gets nothing any more until `mend_replication`: as if the network were cut."""
        cut = self.replica()
        with cut.client() as replica, self.primary().client() as primary:
            replica.config_set("masterauth", "no longer the password")  # it comes back at once, and is not let in
            primary.execute_command("CLIENT", "KILL", "TYPE", "replica")
        return cut

    def mend_replication(self, cut: RedisServer) -> None:
        with cut.client() as client:
            client.config_set("masterauth", self.password or "")

    def _primary(self) -> RedisServer | None:
        votes: Counter[int] = Counter()
        for sentinel in self.sentinels:
            with contextlib.suppress(Exception), sentinel.client() as client:
                address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                votes[int(address[1])] += 1
        for node in self.nodes:
            if votes[self._seen_port(node)] > len(self.sentinels) // 2 and node.alive:
                # A frozen one says nothing: soon asked again, somebody else may be the primary by then.
                return node if node.info("replication", socket_timeout=0.5)["role"] == "master" else None
        return None

    def _replicating(self) -> bool:
        primary = self._primary()
        if primary is None:
            return False
        replica = next(node for node in self.nodes if node is not primary)
        mine, theirs = primary.info("replication"), replica.info("replication")
        if theirs["role"] != "slave" or theirs["master_link_status"] != "up" or not mine["connected_slaves"]:
            return False
        if theirs["master_port"] not in (primary.port, self._seen_port(primary)):
            return False
        return all(self._sees_all(sentinel, primary) for sentinel in self.sentinels)

    def _sees_all(self, sentinel: RedisServer, primary: RedisServer) -> bool:
        with sentinel.client() as client:
            told = _pairs(client.execute_command("SENTINEL", "MASTER", self.service))
            replicas = [_pairs(one) for one in client.execute_command("SENTINEL", "REPLICAS", self.service)]
        return (
            int(told["port"]) == self._seen_port(primary)
            and told["flags"] == "master"
            and int(told["num-other-sentinels"]) == len(self.sentinels) - 1
            and [one["flags"] for one in replicas] == ["slave"]
            and replicas[0]["master-link-status"] == "ok"
        )

    def _seen_port(self, node: RedisServer) -> int:
        return self.proxies[node.port].port if self.proxies else node.port


def _pairs(told: Any) -> dict[str, str]:
    """What a sentinel says of somebody; redis-py makes a dict of some of these answers and leaves others flat."""
    if isinstance(told, dict):
        return {_text(name): _text(value) for name, value in told.items()}
    return {_text(name): _text(value) for name, value in zip(told[::2], told[1::2], strict=True)}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextlib.contextmanager
def valkey_pair(
    sentinels: int = 3,
    *,
    service: str = "ragfence",
    password: str | None = None,
    sentinel_password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    down_after_ms: int = 500,
    failover_timeout_ms: int = 3000,
    tls: TlsKind | None = None,
) -> Iterator[SentinelPair]:
    """Two Valkey servers with an append-only file each, under sentinels that fail over in about a second.

    `password` is that of the servers; the sentinels have one of their own, or none.
    """
    common = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
    common += ["--masterauth", password] if password else []

    def make() -> SentinelPair:
        ports = free_ports(2 + sentinels)
        context = pems.context(mutual=tls == "mutual") if pems else None
        proxies = {port: TlsProxy(port, context, also_plain=True) for port in ports} if context else {}

        def seen(port: int) -> int:
            return proxies[port].port if proxies else port

        def node(port: int, *more: str) -> RedisServer:
            announced = ["--replica-announce-ip", HOST, "--replica-announce-port", str(seen(port))] if proxies else []
            own = folder / f"node-{port}"
            given = [*common, *announced, *more, *args]
            return redis_server(valkey_binary(), port, own, password=password, args=given, appendonly=True)

        first, second, *watching = ports
        nodes = node(first), node(second, "--replicaof", HOST, str(seen(first)))
        monitor = [f"sentinel monitor {service} {HOST} {seen(first)} {sentinels // 2 + 1}"]
        monitor += [f"sentinel down-after-milliseconds {service} {down_after_ms}"]
        monitor += [f"sentinel failover-timeout {service} {failover_timeout_ms}"]
        monitor += [f"sentinel auth-pass {service} {password}"] if password else []
        guards = [
            _sentinel(port, seen(port), folder / f"sentinel-{port}", monitor, sentinel_password) for port in watching
        ]
        said = [f"sentinel_password={sentinel_password}"] if sentinel_password else []
        said += [pems.query(client=tls == "mutual")] if pems else []
        query = f"?{'&'.join(said)}" if said else ""
        scheme = "rediss+sentinel" if pems else "redis+sentinel"
        hosts = ",".join(f"{HOST}:{seen(port)}" for port in watching)
        url = f"{scheme}://{login(password)}{hosts}/{service}/0{query}"
        return SentinelPair(nodes, tuple(guards), service, url, password, pems, proxies)

    with folder_for(data_dir) as folder:
        pems = certificates(folder / "tls") if tls else None
        pair: SentinelPair = started(make)
        try:
            yield pair
        finally:
            pair.end()


def _sentinel(port: int, seen: int, folder: Path, monitor: Sequence[str], password: str | None) -> RedisServer:
    """A sentinel keeps its state in its config file, so each has one of its own, in a folder of its own."""
    folder.mkdir(parents=True)
    lines = [f"port {port}", f"bind {HOST}", f"dir {folder}", *monitor]
    if seen != port:
        lines += [f"sentinel announce-ip {HOST}", f"sentinel announce-port {seen}"]
    if password:
        lines += [f"requirepass {password}", f"sentinel sentinel-pass {password}"]
    config = folder / "sentinel.conf"
    config.write_text("\n".join(lines) + "\n")

    def hurry() -> None:
        with server.client() as client:
            for name, value in _HURRY.items():
                client.execute_command("SENTINEL", "DEBUG", name, value)

    argv = [str(valkey_binary()), str(config), "--sentinel"]
    url = f"redis://{login(password)}{HOST}:{port}"
    server = RedisServer(HOST, port, url, folder, Daemon(argv, hurry, folder, {}), password)
    return server
