"""The servers of the tests themselves: what a drill rests on must be there before anything is said about ragfence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

from tests import servers


def test_a_cluster_spreads_the_slots_over_its_nodes(valkey_cluster_server: servers.RedisCluster) -> None:
    owners = set()
    with valkey_cluster_server.client() as client:
        for number in range(50):
            name = f"spread-{number}"
            client.set(name, number)
            owner = valkey_cluster_server.owner_of(name)
            with owner.client() as direct:
                assert direct.get(name) == str(number).encode()  # not MOVED to somebody else
            owners.add(owner.port)
    assert owners == {node.port for node in valkey_cluster_server.nodes}
    assert sum(len(valkey_cluster_server.slots_of(node)) for node in valkey_cluster_server.nodes) == 16_384


@pytest.mark.parametrize("start", [servers.valkey_cluster, servers.redis62_cluster], ids=["valkey", "redis-6.2"])
def test_a_killed_node_is_missed_and_comes_back_with_what_it_held(
    start: Callable[[], AbstractContextManager[servers.RedisCluster]],
) -> None:
    with start() as cluster:
        names = {cluster.owner_of(f"held-{number}").port: f"held-{number}" for number in range(100)}
        with cluster.client() as client:
            for name in names.values():
                client.set(name, name)
        victim, *others = cluster.nodes
        victim.kill()
        cluster.wait_missed(victim)
        for node in others:
            with node.client() as client:
                assert client.get(names[node.port]) == names[node.port].encode()
        victim.start()
        cluster.wait_whole()
        with victim.client() as client:
            assert client.get(names[victim.port]) == names[victim.port].encode()


def test_a_frozen_node_is_missed_and_goes_on_as_the_same_process() -> None:
    with servers.valkey_cluster() as cluster:
        victim = cluster.nodes[1]
        run_id = victim.info("server")["run_id"]
        victim.freeze()
        cluster.wait_missed(victim)
        with pytest.raises(redis.TimeoutError), victim.client(socket_timeout=0.2, retry=None) as client:
            client.ping()
        victim.thaw()
        cluster.wait_whole()
        assert victim.info("server")["run_id"] == run_id


def test_with_full_coverage_nobody_answers_while_a_node_is_away() -> None:
    with servers.valkey_cluster(full_coverage=True) as cluster:
        cluster.nodes[0].kill()
        cluster.wait_missed(cluster.nodes[0])
        name = next(name for name in map(str, range(100)) if cluster.owner_of(name) is cluster.nodes[1])
        with cluster.nodes[1].client() as client, pytest.raises(redis.exceptions.ClusterDownError):
            client.get(name)


def test_the_replica_takes_over_and_the_killed_primary_comes_back_as_its_replica() -> None:
    with servers.valkey_pair() as pair:
        first, second = pair.primary(), pair.replica()
        assert first is not second
        with first.client() as client:
            client.set("before", "1")
            assert client.wait(1, 5000) == 1
        first.kill()
        assert pair.wait_promoted(first) is second
        with second.client() as client:
            assert client.get("before") == b"1"
            client.set("meanwhile", "2")
        first.start()
        pair.wait_replicating()
        assert (pair.primary(), pair.replica()) == (second, first)
        with first.client() as client:
            assert client.get("meanwhile") == b"2"
            with pytest.raises(redis.exceptions.ReadOnlyError):
                client.set("after", "3")


def test_what_is_written_while_the_replica_is_cut_off_is_lost_with_the_primary() -> None:
    with servers.valkey_pair() as pair:
        primary = pair.primary()
        with primary.client() as client:
            client.set("before", "1")
            assert client.wait(1, 5000) == 1
            replica = pair.cut_replication()
            client.set("meanwhile", "2")
            assert client.wait(1, 200) == 0
        primary.kill()
        with pair.wait_promoted(primary).client() as client:
            assert (client.get("before"), client.get("meanwhile")) == (b"1", None)
        pair.mend_replication(replica)
        primary.start()
        pair.wait_replicating()


@pytest.mark.parametrize("tls", ["server", "mutual"])
def test_tls_is_spoken_by_a_server_a_cluster_and_sentinels(tls: Any) -> None:
    with servers.valkey(tls=tls, password="right") as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    with servers.valkey_cluster(tls=tls, password="right") as cluster, cluster.client() as client:
        for number in range(20):  # on every node, by the ports that the nodes announce
            client.set(f"tls-{number}", number)
    with servers.valkey_pair(tls=tls, password="right", sentinel_password="theirs") as pair:
        with _through_sentinels(pair) as client:
            client.set("tls", "1")
            first = pair.primary()
            first.kill()
            pair.wait_promoted(first)
            servers.wait_until(lambda: client.set("tls", "2"), "the client finds the new primary")
        with pair.primary().client() as direct:
            assert direct.get("tls") == b"2"


def _through_sentinels(pair: servers.SentinelPair) -> Any:
    assert pair.certificates is not None
    tls = {
        "ssl": True,
        "ssl_ca_certs": str(pair.certificates.ca),
        "ssl_certfile": str(pair.certificates.certfile),
        "ssl_keyfile": str(pair.certificates.keyfile),
    }
    doors = [(servers.HOST, pair.proxies[sentinel.port].port) for sentinel in pair.sentinels]
    theirs = {**tls, "password": pair.sentinels[0].password}
    return Sentinel(doors, sentinel_kwargs=theirs, password=pair.password, **tls).master_for(pair.service)


def test_a_server_of_another_authority_is_refused(valkey_tls_server: servers.TlsRedisServer, tmp_path: Path) -> None:
    stranger = servers.certificates(tmp_path / "other")
    url = valkey_tls_server.url.replace(valkey_tls_server.certificates.query(), stranger.query())
    with redis.Redis.from_url(url, retry=None) as client, pytest.raises(redis.ConnectionError, match="CERTIFICATE"):
        client.ping()
    with redis.Redis.from_url(valkey_tls_server.url) as client:
        assert client.ping()


def test_a_plain_client_gets_nothing_out_of_a_tls_port(valkey_tls_server: servers.TlsRedisServer) -> None:
    client = redis.Redis(servers.HOST, valkey_tls_server.tls_port, retry=None, socket_timeout=5)  # type: ignore[arg-type]
    with client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_client_without_a_certificate_is_refused_by_mutual_tls() -> None:
    with servers.valkey(tls="mutual") as server:
        assert isinstance(server, servers.TlsRedisServer)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        bare = server.url.partition("?")[0] + "?" + server.certificates.query()
        with redis.Redis.from_url(bare, retry=None) as client, pytest.raises(redis.ConnectionError):
            client.ping()


def test_a_server_behind_tls_can_be_killed_and_started_again() -> None:
    with (
        servers.valkey(tls="server", appendonly=True) as server,
        redis.Redis.from_url(server.url, retry=None) as client,
    ):
        client.set("kept", "1")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("kept")
        server.start()
        assert client.get("kept") == b"1"
