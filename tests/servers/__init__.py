"""Real servers for the tests: Valkey, Redis 6.2, moto and SeaweedFS, out of their wheels.

Each context manager starts its servers on free ports of 127.0.0.1, returns when they have answered a real command,
and kills them by their own pids at the end. A server also dies with the thread that started it (PR_SET_PDEATHSIG),
so a killed test runner leaves nothing behind: start servers from a thread that lives as long as they should.

    valkey, redis62                   one server; Valkey also behind TLS
    valkey_cluster, redis62_cluster   primaries that share the 16384 slots
    valkey_pair                       a primary, its replica, and the sentinels that fail over
    moto_s3, seaweedfs                S3
"""

from tests.servers.daemons import HOST, Daemon, NotStarted, Server, free_ports, wait_until
from tests.servers.redis_cluster import RedisCluster, redis62_cluster, valkey_cluster
from tests.servers.redis_sentinel import SentinelPair, valkey_pair
from tests.servers.redis_single import RedisServer, TlsRedisServer, redis62, valkey
from tests.servers.s3 import S3_ACCESS_KEY, S3_REGION, S3_SECRET_KEY, S3Server, moto_s3, seaweedfs
from tests.servers.tls import Certificates, TlsProxy, certificates

__all__ = [
    "HOST",
    "S3_ACCESS_KEY",
    "S3_REGION",
    "S3_SECRET_KEY",
    "Certificates",
    "Daemon",
    "NotStarted",
    "RedisCluster",
    "RedisServer",
    "S3Server",
    "SentinelPair",
    "Server",
    "TlsProxy",
    "TlsRedisServer",
    "certificates",
    "free_ports",
    "moto_s3",
    "redis62",
    "redis62_cluster",
    "seaweedfs",
    "valkey",
    "valkey_cluster",
    "valkey_pair",
    "wait_until",
]
