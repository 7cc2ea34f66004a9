"""The forms in which a Redis is named, and the link that each of them opens.

    redis://user:password@host:6379/0                    rediss:// for TLS, unix:// for a socket
    redis+sentinel://host:26379,host:26379/service/0     rediss+sentinel:// for TLS
    redis+cluster://host:6379,host:6379                  rediss+cluster:// for TLS

What follows a `?` are redis-py's own options, for example `ssl_ca_certs=/path/ca.pem`; `sentinel_username` and
`sentinel_password` are the Sentinels' credentials.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry

from ragfence.core.urls import show_url
from ragfence.errors import StoreUnavailable
from ragfence.stores.redis.cluster import ClusterLink
from ragfence.stores.redis.connection import Link, ServerLink, once_more
from ragfence.stores.redis.replies import understood

SENTINEL, CLUSTER = "+sentinel", "+cluster"


class ServerAddress(NamedTuple):
    """The parts of a URL: hosts of a cluster or of Sentinels, the service behind them, and options of connections."""

    hosts: list[tuple[str, int]]
    service: str
    options: dict[str, Any]


def parse_address(url: str, *, timeout_s: float) -> ServerAddress:
    """Raises `StoreUnavailable` for a URL that is not one of Redis."""
    shown, parsed = show_url(url), None
    with contextlib.suppress(ValueError):  # its words quote what was taken for the port: the start of a password, maybe
        parsed = _parsed(url)
    if parsed is None:
        raise StoreUnavailable(
            f"{shown} is not a valid Redis URL",
            hint="redis://user:password@host:6379/0, redis+sentinel://host:26379,host:26379/service/0 or "
            "redis+cluster://host:6379,host:6379, with / ? # and @ in the password percent-encoded",
        )
    timeouts = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, 3.0),
        "retry": once_more(),
        "health_check_interval": 30,
    }
    return parsed._replace(options=parsed.options | timeouts)


def is_cluster(url: str) -> bool:
    return url.partition("://")[0].endswith(CLUSTER)


def open_link(url: str, *, timeout_s: float, hash_tags: Sequence[bytes]) -> Link:
    """Opens a link to the servers of a URL. Connects only to a cluster, whose map of slots has to be known."""
    hosts, service, options = parse_address(url, timeout_s=timeout_s)
    shown, scheme = show_url(url), url.partition("://")[0]
    with understood(shown):
        if scheme.endswith(SENTINEL):
            return ServerLink(shown, _behind_sentinels(hosts, service, options), elects=True)
        if is_cluster(url):
            return ClusterLink(shown, lambda: _cluster(hosts, options), hash_tags)
        return ServerLink(shown, redis.Redis.from_url(url, **_without_url_parts(options)))


def _parsed(url: str) -> ServerAddress:
    """redis-py reads the options of a URL with one host."""
    scheme, _, rest = url.partition("://")
    plain = scheme.removesuffix(SENTINEL).removesuffix(CLUSTER)
    if plain == scheme:
        return ServerAddress([], "", _options(url))
    credentials, at, place = rest.rpartition("@")
    authority, _, tail = place.partition("/")
    authority, question, query = authority.partition("?")
    path, mark, more = tail.partition("?")
    service = ""
    if scheme.endswith(SENTINEL):
        service, _, path = path.partition("/")
        if not service:
            raise ValueError("no service")
    default = 26379 if scheme.endswith(SENTINEL) else 6379
    hosts = [_host(part, default) for part in authority.split(",")]
    query = query if question else more if mark else ""
    options = _options(f"{plain}://{credentials}{at}{hosts[0][0]}:1/{path}" + (f"?{query}" if query else ""))
    if scheme.endswith(CLUSTER) and options.pop("db", 0):
        raise ValueError("a cluster has no numbered databases")
    for name in ("host", "port"):
        options.pop(name, None)
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    return ServerAddress(hosts, service, options)


def _options(url: str) -> dict[str, Any]:
    return dict(parse_url(url))  # type: ignore[no-untyped-call]


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(default_port)
    if not host:
        raise ValueError("no host")
    return host, int(port)


def _without_url_parts(options: dict[str, Any]) -> dict[str, Any]:
    own = ("socket_timeout", "socket_connect_timeout", "retry", "health_check_interval")
    return {name: value for name, value in options.items() if name in own}


def _behind_sentinels(hosts: list[tuple[str, int]], service: str, options: dict[str, Any]) -> Any:
    from redis.sentinel import Sentinel

    # The Sentinels have credentials of their own; TLS and timeouts are those of the servers.
    theirs = {name.removeprefix("sentinel_"): options.pop(name) for name in list(options) if "sentinel_" in name}
    theirs |= {name: value for name, value in options.items() if name.startswith(("ssl", "socket_"))}
    # Each connection attempt goes through all of them again, so none is retried by itself.
    theirs["retry"] = Retry(NoBackoff(), 0)
    sentinels = Sentinel(hosts, sentinel_kwargs=theirs, **options)  # type: ignore[no-untyped-call]
    return sentinels.master_for(service, check_connection=True)  # type: ignore[no-untyped-call]


def _cluster(hosts: list[tuple[str, int]], options: dict[str, Any]) -> Any:
    from redis.cluster import ClusterNode, RedisCluster

    nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
    # A slot without a server stops the operations of its shards, not those of the others.
    return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
