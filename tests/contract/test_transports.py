"""One contract, every transport."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from ragfence.errors import ValidationError
from ragfence.queues.sql import SqlTransport
from ragfence.queues.sqs import SqsTransport
from ragfence.queues.streams import RedisStreamTransport
from ragfence.queues.transport import Envelope
from ragfence.testing.contracts.transports import TransportContract
from tests.servers import RedisCluster, RedisServer, S3Server
from tests.servers.postgres import postgres
from tests.servers.s3 import sqs_queue


class TestSqlite(TransportContract):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> Iterator[SqlTransport]:
        queue = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", visibility_s=self.VISIBILITY_S)
        yield queue
        queue.close()

    @pytest.fixture
    def small_transport(self, tmp_path: Path) -> Iterator[SqlTransport]:
        queue = SqlTransport(f"sqlite:///{tmp_path / 'small.db'}", high_water=3)
        yield queue
        queue.close()


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.mark.xdist_group("postgres")
class TestPostgres(TransportContract):
    @pytest.fixture
    def transport(self, database: str, request: pytest.FixtureRequest) -> Iterator[SqlTransport]:
        queue = SqlTransport(database, request.node.name[:120], visibility_s=self.VISIBILITY_S)
        yield queue
        with queue._engine.begin() as tx:
            tx.execute(sa.text("DELETE FROM ragfence_messages"))
        queue.close()

    @pytest.fixture
    def small_transport(self, database: str, request: pytest.FixtureRequest) -> Iterator[SqlTransport]:
        queue = SqlTransport(database, request.node.name[:120], high_water=3)
        yield queue
        queue.close()


def test_text_that_is_longer_than_its_column_is_refused_as_a_mistake_of_the_sender(tmp_path: Path) -> None:
    queue = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}")
    for envelope in (Envelope(body=1, tenant="t" * 257), Envelope(body=1, group="g" * 257)):
        with pytest.raises(ValidationError):
            queue.send([envelope])
    queue.close()


class OnRedis(TransportContract):
    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def transport(self, url: str) -> Iterator[RedisStreamTransport]:
        queue = RedisStreamTransport(url, uuid.uuid4().hex, visibility_s=self.VISIBILITY_S)
        yield queue
        queue.close()

    @pytest.fixture
    def small_transport(self, url: str) -> Iterator[RedisStreamTransport]:
        queue = RedisStreamTransport(url, uuid.uuid4().hex, high_water=3)
        yield queue
        queue.close()


@pytest.mark.xdist_group("valkey")
class TestValkey(OnRedis):
    @pytest.fixture
    def url(self, valkey_server: RedisServer) -> str:
        return valkey_server.url


@pytest.mark.xdist_group("valkey")
class TestValkeyWithTheDocumentedRights(OnRedis):
    @pytest.fixture
    def url(self, valkey_server: RedisServer) -> Iterator[str]:
        page = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
        (rights,) = re.findall(r"^ACL SETUSER ragfence-queue (.+)$", page, re.M)
        user = f"u{uuid.uuid4().hex}"
        with valkey_server.client() as admin:
            admin.execute_command("ACL", "SETUSER", user, "reset", *rights.replace(">secret", ">pw").split())
            yield valkey_server.url.replace("redis://", f"redis://{user}:pw@")
            admin.execute_command("ACL", "DELUSER", user)


@pytest.mark.xdist_group("redis62")
class TestRedis62(OnRedis):
    @pytest.fixture
    def url(self, redis62_server: RedisServer) -> str:
        return redis62_server.url


@pytest.mark.xdist_group("cluster")
class TestValkeyCluster(OnRedis):
    @pytest.fixture
    def url(self, valkey_cluster_server: RedisCluster) -> str:
        return valkey_cluster_server.url


@pytest.mark.xdist_group("moto")
class TestSqsStandard(TransportContract):
    ORDERS_GROUPS = False
    SERVES_TENANTS_IN_TURN = False
    PROVES_RACES = False  # moto is a stand-in
    SUFFIX = ""

    @pytest.fixture
    def transport(self, moto_server: S3Server, s3_env: None) -> Iterator[SqsTransport]:
        name = sqs_queue(moto_server, self.SUFFIX)
        queue = SqsTransport(name, endpoint_url=moto_server.url, visibility_s=self.VISIBILITY_S)
        yield queue
        queue.close()


@pytest.mark.xdist_group("moto")
class TestSqsFifo(TestSqsStandard):
    ORDERS_GROUPS = True
    DELAYS_EACH_MESSAGE = False
    SUFFIX = ".fifo"
