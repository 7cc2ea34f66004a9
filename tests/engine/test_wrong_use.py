"""Wrong use is a clear error: of the right type, naming the thing, with a hint that says what to do.

What goes wrong inside an effect (a result that is not JSON or too big, the same key again) is in `test_once.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import ragfence
from ragfence import Document, Fence, Operation, Policy
from ragfence.core.urls import show_url
from ragfence.errors import (
    ObjectsRequired,
    PolicyError,
    RagfenceError,
    StoreAuth,
    StoreUnavailable,
    StoreUnsafe,
    TerminalError,
    UnknownStore,
    ValidationError,
)
from ragfence.testing.memory import MemoryFences, MemoryObjects
from tests import servers
from tests.engine.worlds import World
from tests.stores.test_s3 import lying

OPERATION = Operation(kind="t", source_id="a")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in ("STORE", "OBJECTS", "TENANT", "POLICY"):
        monkeypatch.delenv(f"RAGFENCE_{name}", raising=False)


def refused(kind: type[RagfenceError], call: Callable[[], Any], *, names: str, hint: str) -> RagfenceError:
    with pytest.raises(RagfenceError) as caught:
        call()
    error = caught.value
    assert type(error) is kind
    assert names in error.message
    assert hint in error.hint
    return error


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def perform(fence: Fence) -> ragfence.Receipt:
    with fence.claim(OPERATION) as op:
        if op.is_new:
            op.seal()
    return op.receipt


@pytest.mark.parametrize(
    "url",
    ["postgres://localhost/db", "http://localhost", "memcached://x", "://x", "redis:localhost:6379", "localhost:1"],
)
def test_an_unknown_fence_store_is_refused_with_the_forms_there_are(url: str) -> None:
    refused(UnknownStore, lambda: ragfence.open(url), names=show_url(url), hint="redis://host:6379/0")
    assert files() == []


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "https://bucket.example.org", "redis://localhost", "s3:bucket"])
def test_an_unknown_object_store_is_refused_with_the_forms_there_are(url: str) -> None:
    refused(UnknownStore, lambda: ragfence.open(objects=url), names=show_url(url), hint="s3://bucket/prefix")
    assert files() == []


def test_an_empty_name_is_no_folder() -> None:
    refused(UnknownStore, lambda: ragfence.open(""), names="''", hint="or a folder")
    refused(UnknownStore, lambda: ragfence.open(objects=""), names="''", hint="or a folder")


def test_an_error_never_repeats_the_password_of_a_url() -> None:
    for opened in (
        lambda: ragfence.open("mysql://me:hunter2@localhost/db"),
        lambda: ragfence.open(objects="gs://me:hunter2@bucket"),
        lambda: ragfence.open("redis://me:hunter2@127.0.0.1:1/0"),
        lambda: ragfence.open("redis://me:hunter2@127.0.0.1:1/0", policy=Policy(stores={"fence": "sqlite"})),
    ):
        with pytest.raises(RagfenceError) as caught:
            opened()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://bucket/prefix?endpoint=http://localhost", "endpoint_url, region"),
        ("s3://bucket?region=&acl", "endpoint_url, region"),
    ],
)
def test_an_s3_url_without_a_bucket_or_with_unknown_options_is_refused(url: str, hint: str) -> None:
    refused(UnknownStore, lambda: ragfence.open(objects=url), names=show_url(url), hint=hint)


@pytest.mark.parametrize("url", ["file://", "file:///", "file://server/share"])
def test_a_file_url_that_names_no_folder_of_this_machine_is_refused(url: str) -> None:
    refused(UnknownStore, lambda: ragfence.open(objects=url), names=show_url(url), hint="file:///absolute/path")


def test_a_file_url_may_hold_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    with ragfence.open(objects=f"file://{quote(str(folder))}") as fence:
        perform(fence)
    assert (folder / "objects").is_dir()


@pytest.mark.parametrize(
    ("store", "file", "objects"),
    [
        ("sqlite:///fences.db", "fences.db", "objects"),
        ("sqlite:///sub/of/this.db", "sub/of/this.db", "sub/of/objects"),
        ("sqlite:///no-suffix", "no-suffix", "objects"),
        ("sqlite:////{tmp}/abs/x.db", "abs/x.db", "abs/objects"),
        ("folder", "folder/fences.db", "folder/objects"),
        ("folder/sub/", "folder/sub/fences.db", "folder/sub/objects"),
        ("{tmp}/abs", "abs/fences.db", "abs/objects"),
        ("my.db", "my.db", "objects"),
        ("my.sqlite", "my.sqlite", "objects"),
        ("./my.db", "my.db", "objects"),
        ("folder.v2", "folder.v2/fences.db", "folder.v2/objects"),
        (Path("a:b"), "a:b/fences.db", "a:b/objects"),
        (Path("my.db"), "my.db", "objects"),
        (None, ".ragfence/fences.db", ".ragfence/objects"),
    ],
)
def test_an_embedded_store_is_where_its_url_or_path_says(store: Any, file: str, objects: str, tmp_path: Path) -> None:
    if isinstance(store, str):
        store = store.replace("{tmp}", str(tmp_path).removeprefix("/") if "://" in store else str(tmp_path))
    with ragfence.open(store) as fence:
        perform(fence)
    assert (tmp_path / file).is_file()
    assert (tmp_path / objects / "objects" / "default" / "sealed").is_dir()


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://fences.db", "sqlite://host/fences.db"),
        *("sqlite:///fences.db?mode=ro", "sqlite://./fences.db"),
    ],
)
def test_an_sqlite_url_that_names_no_file_is_refused(url: str) -> None:
    refused(UnknownStore, lambda: ragfence.open(url), names=show_url(url), hint="sqlite:////absolute")
    assert files() == []


def test_an_embedded_fence_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ragfence.open() as fence:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        worker = threading.Thread(target=perform, args=[fence])  # with a connection of its own
        worker.start()
        worker.join()
        assert files() == []
        assert perform(fence).decision == "duplicate"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(UnknownStore, lambda: ragfence.open("file/sub"), names="file", hint="name a folder")


def test_a_redis_that_cannot_be_reached_is_named() -> None:
    (port,) = servers.free_ports(1)
    error = refused(
        StoreUnavailable,
        lambda: ragfence.open(f"redis://127.0.0.1:{port}/0"),
        names=f"redis://127.0.0.1:{port}/0",
        hint="running and reachable",
    )
    assert error.retryable


def test_a_server_that_is_no_redis_is_named(moto_server: servers.S3Server) -> None:
    url = f"redis://{moto_server.host}:{moto_server.port}/0"
    with pytest.raises(StoreUnavailable, match=url):
        ragfence.open(url)


def test_a_redis_that_wants_another_password_says_so() -> None:
    with servers.valkey(password="right") as server:
        for login in ("wrong", "user:wrong"):
            url = f"redis://{login if ':' in login else ':' + login}@{server.host}:{server.port}/0"
            error = refused(StoreAuth, lambda url=url: ragfence.open(url), names=str(server.port), hint="password")
            assert "wrong@" not in str(error)
        without = f"redis://{server.host}:{server.port}/0"
        refused(StoreAuth, lambda: ragfence.open(without), names=without, hint="password")
        ragfence.open(server.url).close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_redis_that_evicts_is_refused(policy: str) -> None:
    with servers.valkey(args=("--maxmemory", "64mb", "--maxmemory-policy", policy)) as server:
        refused(StoreUnsafe, lambda: ragfence.open(server.url), names=policy, hint="maxmemory-policy noeviction")


def test_a_replica_is_refused(valkey_server: servers.RedisServer) -> None:
    primary = (valkey_server.host, str(valkey_server.port))
    with servers.valkey(args=("--replicaof", *primary)) as server:
        refused(StoreUnsafe, lambda: ragfence.open(server.url), names="is a replica", hint="open the primary")


def test_a_bucket_that_does_not_exist_is_named(moto_server: servers.S3Server, s3_env: None) -> None:
    url = f"s3://no-such-bucket/prefix?endpoint_url={moto_server.url}"
    refused(UnknownStore, lambda: ragfence.open(objects=url), names="'no-such-bucket'", hint="aws s3 mb")


def test_an_s3_server_that_cannot_be_reached_is_named(s3_env: None) -> None:
    (port,) = servers.free_ports(1)
    url = f"s3://bucket/prefix?endpoint_url=http://127.0.0.1:{port}"
    refused(StoreUnavailable, lambda: ragfence.open(objects=url), names=f"127.0.0.1:{port}", hint="running")


def test_an_s3_server_without_conditional_writes_is_refused(s3_env: None) -> None:
    with lying("ignores If-None-Match") as server:
        url = f"s3://bucket/prefix?endpoint_url={server.url}"
        refused(
            StoreUnsafe, lambda: ragfence.open(objects=url), names="ignores If-None-Match", hint="conditional writes"
        )


def test_a_region_in_the_url_is_used(moto_server: servers.S3Server, s3_env: None, monkeypatch: Any) -> None:
    monkeypatch.delenv("AWS_REGION")
    url = f"s3://{moto_server.bucket}/region?endpoint_url={moto_server.url}&region=eu-west-1"
    with ragfence.open(objects=url) as fence:
        assert perform(fence).is_new


def test_a_store_whose_package_is_not_installed_says_what_to_install() -> None:
    script = """
import sys
sys.modules["redis"] = sys.modules["boto3"] = sys.modules["botocore"] = None
import ragfence
for call in (lambda: ragfence.open("redis://localhost"), lambda: ragfence.open(objects="s3://bucket")):
    try:
        call()
    except ragfence.errors.UnknownStore as error:
        print(error.message, error.hint)
ragfence.open().close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "This store needs the package 'redis', which is not installed pip install 'ragfence[redis]'",
        "This store needs the package 'boto3', which is not installed pip install 'ragfence[s3]'",
    ]


def test_importing_ragfence_loads_no_backend() -> None:
    script = """
import sys
import ragfence
assert ragfence.open and ragfence.errors
heavy = {"redis", "boto3", "botocore", "pyarrow", "dagster", "lancedb", "jsonpatch"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SURFACES: dict[str, Callable[[Fence], Any]] = {
    "indexes": lambda fence: fence.indexes,
    "aliases": lambda fence: fence.aliases,
    "search": lambda fence: fence.search("docs", "how?"),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_what_needs_objects_is_refused_by_a_fence_without(surface: str) -> None:
    with ragfence.open(MemoryFences(solo=True)) as fence:
        refused(ObjectsRequired, lambda: SURFACES[surface](fence), names=surface, hint="objects='s3://bucket/prefix'")


def test_documents_are_refused_by_a_redis_without_objects(valkey_server: servers.RedisServer) -> None:
    with ragfence.open(valkey_server.url, tenant="wrong-use") as fence:
        refused(ObjectsRequired, lambda: fence.documents, names="documents", hint="objects=")


def test_a_fence_without_objects_cannot_be_hydrated() -> None:
    with ragfence.open(MemoryFences(solo=True)) as fence:
        refused(ObjectsRequired, fence.hydrate, names="nothing to hydrate from", hint="objects=")


@pytest.mark.parametrize("solo", [True, False])
def test_a_store_made_for_another_use_is_refused(solo: bool) -> None:
    objects = MemoryObjects() if solo else None
    opened = lambda: ragfence.open(MemoryFences(solo=solo), objects=objects)  # noqa: E731
    refused(ValidationError, opened, names="solo=True", hint="solo=True exactly when there is no object store")


def test_a_store_of_another_tenant_is_refused() -> None:
    store = MemoryFences("acme", solo=True)
    refused(ValidationError, lambda: ragfence.open(store), names="'acme', not 'default'", hint="tenant='acme'")


def test_an_operation_of_another_tenant_is_refused() -> None:
    with ragfence.open(MemoryFences(solo=True)) as fence, pytest.raises(ValidationError, match="tenant 'acme'"):
        fence.claim(Operation(kind="t", source_id="a", tenant="acme"))


def test_what_is_neither_open_nor_closed_is_refused() -> None:
    with ragfence.open(MemoryFences(solo=True)) as fence, pytest.raises(ValidationError, match="'maybe'"):
        fence.once(kind="t", key=lambda: "a", on_store_error="maybe")


def test_a_policy_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(PolicyError, lambda: ragfence.open(policy="missing.yml"), names="missing.yml", hint="RAGFENCE_POLICY")
    monkeypatch.setenv("RAGFENCE_POLICY", "also-missing.yml")
    refused(PolicyError, ragfence.open, names="also-missing.yml", hint="RAGFENCE_POLICY")
    assert files() == []


def test_a_policy_that_breaks_a_promise_is_refused_at_open(tmp_path: Path) -> None:
    (tmp_path / "ragfence.yml").write_text("stores: {ttl: {webhook_days: 1}}")
    with pytest.raises(PolicyError, match=r"stores\.ttl\.webhook_days: 1 is below"):
        ragfence.open()


def test_a_policy_for_another_store_is_refused() -> None:
    wants_redis, wants_sqlite = Policy(stores={"fence": "redis"}), Policy(stores={"fence": "sqlite"})
    refused(PolicyError, lambda: ragfence.open(policy=wants_redis), names="in redis", hint="RAGFENCE_STORE")
    refused(
        PolicyError, lambda: ragfence.open("redis://nowhere/0", policy=wants_sqlite), names="in sqlite", hint="policy"
    )
    assert files() == []
    ragfence.open(policy=wants_sqlite).close()


def test_settings_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strict.yml").write_text("lease: {max_attempts: 1}")
    monkeypatch.setenv("RAGFENCE_STORE", "sqlite:///env/fences.db")
    monkeypatch.setenv("RAGFENCE_OBJECTS", "env/elsewhere")
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")
    monkeypatch.setenv("RAGFENCE_POLICY", "strict.yml")
    with ragfence.open() as fence:
        assert (fence.tenant, fence.policy.lease.max_attempts) == ("acme", 1)
        perform(fence)
    assert (tmp_path / "env/fences.db").is_file()
    assert (tmp_path / "env/elsewhere/objects/acme").is_dir()


def test_an_argument_is_stronger_than_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_STORE", "redis://nowhere.invalid/0")
    monkeypatch.setenv("RAGFENCE_OBJECTS", "gs://nothing")
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")
    monkeypatch.setenv("RAGFENCE_POLICY", "missing.yml")
    with ragfence.open("here", objects=os.fspath(tmp_path / "there"), tenant="other", policy=Policy()) as fence:
        assert fence.tenant == "other"


def test_a_store_from_the_environment_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_STORE", "etcd://localhost")
    refused(UnknownStore, ragfence.open, names="etcd://localhost", hint="redis://")


def test_the_object_store_is_closed_when_the_fence_store_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr("ragfence.stores.local.LocalObjects.close", lambda self: closed.append(1))
    (port,) = servers.free_ports(1)
    with pytest.raises(StoreUnavailable):
        ragfence.open(f"redis://127.0.0.1:{port}/0", objects="here")
    assert closed == [1]


def test_the_operations_of_documents_are_not_claimed_by_hand(memory: World) -> None:
    operation = Operation(kind="document", source_id="a", action="ingest")
    fence = memory.open()
    refused(ValidationError, lambda: fence.claim(operation).__enter__(), names="document", hint="fence.documents")
    with fence.claim(Operation(kind="document", source_id="a")) as op:
        op.seal()


@pytest.mark.parametrize("work", [Fence.hydrate, lambda fence, progress: fence.audit.check(progress)])
def test_a_progress_callback_that_raises_stop_iteration_is_a_clear_error(work: Callable[..., object]) -> None:
    def stop(done: int) -> None:
        raise StopIteration

    with ragfence.open() as fence:
        fence.documents.ingest(Document(doc_id="a", text="It rains."))
        refused(TerminalError, lambda: work(fence, stop), names="StopIteration", hint="another error")
