"""The servers, one of each kind per test session (and worker), started only when a test asks for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("ragfence.testing.contracts")

from tests import servers, thorough  # noqa: E402  (what it imports shall be rewritten, too)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves out and `make test-all` adds."""
    for item in items:
        if (reason := thorough.reason_for(item.nodeid)) is not None:
            item.add_marker(pytest.mark.thorough(reason))


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[servers.RedisServer]:
    with servers.valkey() as server:
        yield server


@pytest.fixture(scope="session")
def redis62_server() -> Iterator[servers.RedisServer]:
    with servers.redis62() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster_server() -> Iterator[servers.RedisCluster]:
    """Shared: a test that kills or freezes nodes starts a cluster of its own."""
    with servers.valkey_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def valkey_tls_server() -> Iterator[servers.TlsRedisServer]:
    """Its certificate is verified, and it asks for none."""
    with servers.valkey(tls="server") as server:
        assert isinstance(server, servers.TlsRedisServer)
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[servers.S3Server]:
    with servers.moto_s3() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[servers.S3Server]:
    with servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def one_botocore_loader() -> Iterator[None]:
    """Every boto3 session parses the same megabytes of JSON again, for 0.1 s a store; once will do."""
    import botocore.loaders

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", functools.cache(botocore.loaders.create_loader))
        yield


@pytest.fixture
def s3_env(monkeypatch: pytest.MonkeyPatch, one_botocore_loader: None) -> None:
    """The credentials of our own servers in the environment, and nothing of the machine's."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.S3_ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.S3_SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", servers.S3_REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
