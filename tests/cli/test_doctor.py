"""`ragfence doctor` on real stores, each with a fault planted: it says which, and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

import ragfence
from ragfence import Operation
from ragfence.core.urls import holds_password
from ragfence.queues import Envelope, open_transport
from tests import servers
from tests.cli.conftest import Site, perform, run
from tests.engine.worlds import eventually
from tests.faulty_http import Fault, FaultyProxy
from tests.servers.s3 import sqs_queue
from tests.stores.test_s3 import lying

WARNING = (
    "WARNING: the password in --store can be read by every user of this machine (ps); "
    "use --store-env NAME, --store-file FILE, or RAGFENCE_STORE instead."
)


def found(*options: str, code: int | None = None) -> list[dict[str, Any]]:
    """The checks of a run; the code it ended with follows from them."""
    done = run("doctor", *options, "--json")
    told = json.loads(done.stdout)
    fails = any(check["level"] == "fail" for check in told["checks"])
    store = options[options.index("--store") + 1] if "--store" in options else ""
    warned = [WARNING] if holds_password(store) else []
    assert [line for line in done.stderr.splitlines() if line] == warned
    assert done.exit_code == (int(fails) if code is None else code), done.stdout
    for check in told["checks"]:
        assert (check["level"] == "ok") == (check["advice"] is None), check
    return list(told["checks"])


def level_of(checks: list[dict[str, Any]], text: str) -> str:
    (level,) = {check["level"] for check in checks if text in check["text"]}
    return str(level)


def fails(checks: list[dict[str, Any]]) -> list[str]:
    return [check["text"] for check in checks if check["level"] == "fail"]


def test_a_healthy_embedded_store_is_all_ok(embedded: Site) -> None:
    perform(embedded.open(), "a")
    checks = found("--strict")
    assert {check["level"] for check in checks} == {"ok"}
    assert {check["subject"] for check in checks} == {"policy", "sqlite", "objects", "journal"}
    for text in ("quick_check finds nothing", "journal_mode is wal", "all 64 shards ready", "create-only writes work"):
        assert level_of(checks, text) == "ok"
    done = run("doctor")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok    ") for line in lines[:-1])
    assert lines[-1] == f"{len(checks)} ok, 0 warn, 0 fail"
    assert list(Path(".ragfence/objects/objects/.probe").iterdir()) == []


def test_a_store_that_is_not_there_yet_is_fine_and_is_not_made(tmp_path: Path) -> None:
    assert fails(found()) == []
    assert "is not there yet" in run("doctor").stdout
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_followed_by_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "f.db").write_bytes(b"this is no database, but long enough to be looked at" * 100)
    done = run("doctor", "--store", "f.db")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith("fail")]
    assert "cannot be read: file is not a database" in lines[at]
    assert lines[at + 1].startswith("      -> ")
    assert lines[-1].endswith("1 fail")


def test_a_damaged_file_is_found(embedded: Site) -> None:
    fence = embedded.open()
    for number in range(200):
        perform(fence, f"s{number}")
    embedded.opened.pop().close()
    with closing(sqlite3.connect(".ragfence/fences.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(".ragfence/fences.db", "r+b") as file:
        file.seek(5 * 4096)
        file.write(os.urandom(30 * 4096))
    (text,) = fails(found())
    assert "is damaged" in text or "cannot be read" in text


def test_a_newer_file_is_refused(embedded: Site) -> None:
    embedded.open()
    embedded.opened.pop().close()
    with closing(sqlite3.connect(".ragfence/fences.db")) as db:
        db.execute("PRAGMA user_version = 99")
    (text,) = fails(found())
    assert "has schema 99" in text


def test_a_file_without_wal_is_a_warning(embedded: Site) -> None:
    embedded.open()
    embedded.opened.pop().close()
    with closing(sqlite3.connect(".ragfence/fences.db")) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    checks = found()
    assert level_of(checks, "journal_mode is delete") == "warn"
    assert {check["level"] for check in found()} == {"ok"}, "whoever opened it turned WAL on"


def test_a_strict_doctor_takes_a_warning_for_a_failure(embedded: Site) -> None:
    perform(embedded.open(), "a")
    embedded.opened[0].inspector.fences.forget_markers(2**60)
    assert embedded.opened[0].inspector.fences.begin_epoch(9)
    assert level_of(found("--strict", code=1), "64 being hydrated") == "warn"
    assert level_of(found(), "64 being hydrated") == "warn"


@pytest.mark.parametrize("where", [".ragfence/fences.db", "elsewhere/fences.db"])
def test_a_place_nobody_may_write_to_is_found(embedded: Site, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    perform(embedded.open(), "a")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who may everything
    assert any("not writable" in text for text in fails(found("--store", where)))


def test_a_folder_without_hard_links_is_found(embedded: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    perform(embedded.open(), "a")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (text,) = fails(found())
    assert "cannot link files" in text


def test_objects_that_are_no_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (text,) = fails(found("--objects", str(tmp_path / "file")))
    assert "cannot keep objects" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--store", "mysql://h/db"], "does not name a fence store"),
        (["--store", "redis:localhost"], "is neither a URL nor a folder"),
        (["--objects", "gs://bucket"], "does not name an object store"),
        (["--policy", "missing.yml"], "no such policy file"),
    ],
)
def test_what_cannot_be_opened_at_all_is_a_line_and_the_rest_is_checked(options: list[str], text: str) -> None:
    checks = found(*options)
    assert [text in said for said in fails(checks)] == [True]
    assert {"policy", "journal"} <= {check["subject"] for check in checks}
    if options[0] == "--objects":
        assert "sqlite" in {check["subject"] for check in checks}


def test_a_policy_that_is_refused_or_wants_another_store_is_found(tmp_path: Path) -> None:
    (tmp_path / "ragfence.yml").write_text("stores: {fence: redis}")
    (text,) = fails(found())
    assert "requires fences in redis" in text
    (tmp_path / "ragfence.yml").write_text("stores: {ttl: {api_hours: 1}}")
    (text,) = fails(found())
    assert "stores.ttl.api_hours" in text
    (tmp_path / "good.yml").write_text("lease: {ttl_s: 10}")
    assert level_of(found("--policy", "good.yml"), "good.yml") == "ok"


def test_effects_that_wait_in_the_journal_are_a_warning(embedded: Site, tmp_path: Path) -> None:
    with servers.valkey() as server:
        url = server.url
        fence = ragfence.open(url, policy=ragfence.Policy(on_store_error="open", lease={"seal_retry_s": 0}))
        embedded.opened.append(fence)
    mail = fence.once(kind="mail", key=lambda to: to)(lambda to: to)  # the server is gone
    assert mail("a@example.org").flags.journaled
    perform(embedded.open(), "a")
    checks = found()
    assert level_of(checks, "1 effect ran while the fence store was down") == "warn"
    assert level_of(found("--journal", str(tmp_path / "other")), "nothing waits") == "ok"
    (file,) = Path(".ragfence/journal").glob("*.jsonl")
    file.write_text("{broken\n")
    assert "is not a valid entry" in fails(found())[0]


def on(server: servers.RedisServer, *more: str) -> tuple[str, ...]:
    return ("--store", server.url, "--tenant", f"doctor-{uuid.uuid4().hex}", *more)


@pytest.fixture(scope="module")
def own() -> Iterator[servers.RedisServer]:
    """A server whose settings these tests change."""
    with servers.valkey(appendonly=True) as server:
        yield server


def test_a_healthy_server_is_all_ok(own: servers.RedisServer, tmp_path: Path) -> None:
    options = on(own, "--objects", str(tmp_path / "o"))
    with ragfence.open(own.url, objects=tmp_path / "o", tenant=options[3]) as fence:
        perform(fence, "a")
    checks = found(*options, "--strict")
    assert {check["level"] for check in checks} == {"ok"}
    assert {check["subject"] for check in checks} == {
        *("policy", f"redis {own.host}:{own.port}", "redis", "objects", "journal")
    }
    for text in ("Valkey 9", "noeviction", "append-only file on, appendfsync", "is a primary", "all 64 shards ready"):
        assert level_of(checks, text) == "ok"
    with redis.Redis.from_url(own.url) as client:
        assert client.keys("*doctor-*ldoctor*") == [], "what the doctor wrote is gone"


def test_an_evicting_server_is_found_although_it_cannot_be_opened(tmp_path: Path) -> None:
    with servers.valkey(args=("--maxmemory-policy", "allkeys-lru")) as server:
        with pytest.raises(ragfence.errors.StoreUnsafe):
            ragfence.open(server.url)
        checks = found(*on(server, "--objects", str(tmp_path)))
    (text,) = fails(checks)
    assert "maxmemory-policy is allkeys-lru" in text
    assert level_of(checks, "create-only writes work") == "ok", "the other store is checked"
    assert level_of(checks, "no persistence") == "warn"


def test_a_wrong_password_is_found_and_not_shown(tmp_path: Path) -> None:
    with servers.valkey(password="geheim") as server:
        for url in (server.url.replace("geheim", "erraten"), server.url.replace(":geheim@", "")):
            done = run("doctor", "--store", url, "--objects", str(tmp_path))
            assert done.exit_code == 1
            assert "erraten" not in done.output
            assert "refused the login" in done.stdout
            assert "check user and password" in done.stdout
            assert "create-only writes work" in done.stdout
        assert fails(found(*on(server))) == []


def test_a_dead_port_is_found(tmp_path: Path) -> None:
    (port,) = servers.free_ports(1)
    checks = found("--store", f"redis://127.0.0.1:{port}/0", "--objects", str(tmp_path))
    (text,) = fails(checks)
    assert "did not answer" in text
    assert level_of(checks, "create-only writes work") == "ok"


def test_a_replica_is_found_and_the_primary_tells_of_it(own: servers.RedisServer, tmp_path: Path) -> None:
    with servers.valkey(args=("--replicaof", own.host, str(own.port))) as replica:
        eventually(lambda: replica.info("replication")["master_link_status"] == "up")
        assert any(f"is a replica of {own.host}:{own.port}" in text for text in fails(found(*on(replica))))
        eventually(lambda: own.info("replication")["slave0"]["state"] == "online")
        assert level_of(found(*on(own)), "1 replicas online") == "ok"
        (tmp_path / "one.yml").write_text("durability: {wait_replicas: 1}")
        (tmp_path / "two.yml").write_text("durability: {wait_replicas: 2}")
        assert fails(found(*on(own, "--policy", "one.yml"))) == []
        assert any("waits for 2 replicas" in text for text in fails(found(*on(own, "--policy", "two.yml"))))


def test_waiting_for_a_file_that_is_off_or_unknown_is_found(
    own: servers.RedisServer, valkey_server: servers.RedisServer, redis62_server: servers.RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "p.yml").write_text("durability: {wait_aof: true}")
    assert fails(found(*on(own, "--policy", "p.yml"))) == []
    assert any("and it is off" in text for text in fails(found(*on(valkey_server, "--policy", "p.yml"))))
    assert any("has no WAITAOF" in text for text in fails(found(*on(redis62_server, "--policy", "p.yml"))))
    assert any("SQLite has no" in text for text in fails(_with_a_file("--policy", "p.yml")))


def _with_a_file(*options: str) -> list[dict[str, Any]]:
    with ragfence.open(policy=ragfence.Policy()) as fence:
        perform(fence, "a")
    return found(*options)


@pytest.mark.parametrize("missing", ["xadd", "incr", "evalsha", "script|load", "info", "scan"])
def test_a_command_the_user_may_not_run_is_named(own: servers.RedisServer, missing: str) -> None:
    user = f"u{uuid.uuid4().hex}"
    rules = ["on", ">pw", "~rf{*", "+@all", f"-{missing}"]
    with redis.Redis.from_url(own.url) as admin:
        admin.execute_command("ACL", "SETUSER", user, "reset", *rules)
        try:
            url = own.url.replace("redis://", f"redis://{user}:pw@")
            checks = found("--store", url)
        finally:
            admin.execute_command("ACL", "DELUSER", user)
    (text,) = fails(checks)
    assert text == f"this user may not run {missing}"
    assert any(f"+{missing}" in (check["advice"] or "") for check in checks)


def test_the_documented_rights_are_enough_for_the_doctor(own: servers.RedisServer) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
    rules, *_besides = re.findall(r"^ACL SETUSER ragfence (.+)$", page, re.M)
    user = f"u{uuid.uuid4().hex}"
    with redis.Redis.from_url(own.url) as admin:
        admin.execute_command("ACL", "SETUSER", user, "reset", *rules.replace(">secret", ">pw").split())
        try:
            checks = found("--store", own.url.replace("redis://", f"redis://{user}:pw@"))
        finally:
            admin.execute_command("ACL", "DELUSER", user)
    assert fails(checks) == []
    assert level_of(checks, "append-only file on") == "ok"


def test_a_queue_on_streams_that_is_not_durable_is_found(own: servers.RedisServer, embedded: Site) -> None:
    perform(embedded.open(), "a")
    url = f"{own.url}?queue=doctor-{uuid.uuid4().hex}"
    (text,) = fails(found("--queue", url))
    assert text == "appendfsync everysec: a crash loses messages that were accepted"
    with redis.Redis.from_url(own.url) as admin:
        try:
            admin.config_set("appendfsync", "always")
            checks = found("--queue", url)
        finally:
            admin.config_set("appendfsync", "everysec")
    assert level_of(checks, "what was accepted is on disk") == "ok"
    assert level_of(found("--queue", f"{url}&wait_replicas=1"), "send waits for 1 replica") == "ok"


def test_queues_are_checked_and_not_created(own: servers.RedisServer, embedded: Site, tmp_path: Path) -> None:
    perform(embedded.open(), "a")
    file = tmp_path / "queue.db"
    assert level_of(found("--queue", f"sqlite:///{file}?queue=orders"), "not there yet") == "ok"
    assert not file.exists()
    queue = open_transport(f"sqlite:///{file}", queue="orders", visibility_s=60)
    queue.send([Envelope(body=1), Envelope(body=2)])
    assert queue.dead(queue.receive(1, 1)[0], "broken")
    queue.close()
    checks = found("--queue", f"sqlite:///{file}?queue=orders")
    assert level_of(checks, "answers; 1 waiting, 0 in flight") == "ok"
    assert level_of(checks, "1 dead letter") == "warn"
    (tmp_path / "p.yml").write_text("lease: {ttl_s: 120}")
    (text,) = fails(found("--queue", f"sqlite:///{file}?queue=orders", "--policy", "p.yml"))
    assert text == "messages are hidden for 60 s, and a lease lasts 120 s"
    (port,) = servers.free_ports(1)
    done = run("doctor", "--queue", f"redis://u:geheim@127.0.0.1:{port}?queue=a", "--queue", "amqp://u:geheim@host")
    assert done.exit_code == 1
    assert "geheim" not in done.output
    assert done.stdout.count("fail  queue") == 2


def test_a_queue_of_sqs_without_a_place_for_dead_letters_is_found(
    moto_server: servers.S3Server, s3_env: None, embedded: Site
) -> None:
    perform(embedded.open(), "a")
    name = sqs_queue(moto_server, dead_letters=False)
    (text,) = fails(found("--queue", f"sqs://{name}?endpoint_url={moto_server.url}"))
    assert "has no redrive policy" in text
    good = sqs_queue(moto_server)
    assert fails(found("--queue", f"sqs://{good}?endpoint_url={moto_server.url}")) == []


def test_a_server_that_is_almost_full_is_found(own: servers.RedisServer) -> None:
    found(*on(own))  # loads the scripts, which take memory of their own on a new server
    with redis.Redis.from_url(own.url) as admin:
        used = int(admin.info("memory")["used_memory"])
        try:
            admin.config_set("maxmemory", int(used / 0.87))
            assert level_of(found(*on(own)), "MiB used of") == "warn"
            admin.config_set("maxmemory", int(used / 0.97))
            assert level_of(found(*on(own)), "MiB used of") == "fail"
        finally:
            admin.config_set("maxmemory", 0)


def test_a_snapshot_that_failed_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with servers.valkey(data_dir=folder) as server, redis.Redis.from_url(server.url) as admin:
        admin.config_set("save", "3600 1")
        assert level_of(found(*on(server)), "snapshots only (save 3600 1)") == "warn"
        shutil.rmtree(folder)  # as a disk that is not there any more
        admin.bgsave()
        eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        assert any("the last snapshot (BGSAVE) failed" in text for text in fails(found(*on(server))))


def test_a_server_that_was_restarted_says_what_that_means(tmp_path: Path) -> None:
    with servers.valkey(data_dir=tmp_path / "data", appendonly=True) as server:
        options = on(server)
        with ragfence.open(server.url, tenant=options[3]) as fence:
            perform(fence, "a")
        assert level_of(found(*options), "1 of 64 shards in use") == "ok"
        server.restart()
        assert level_of(found(*options), "the store was restarted") == "warn"


def test_each_node_of_a_cluster_is_checked(valkey_cluster_server: servers.RedisCluster, tmp_path: Path) -> None:
    cluster = valkey_cluster_server
    options = ("--store", cluster.url, "--tenant", f"doctor-{uuid.uuid4().hex}", "--objects", str(tmp_path / "o"))
    checks = found(*options)
    assert fails(checks) == []
    nodes = {f"redis {node.host}:{node.port}" for node in cluster.nodes}
    assert {check["subject"] for check in checks} >= nodes
    assert sum("the cluster is whole" in check["text"] for check in checks) == len(cluster.nodes)
    bad = cluster.nodes[1]
    with redis.Redis(bad.host, bad.port) as admin:
        admin.config_set("maxmemory-policy", "volatile-lru")
        try:
            checks = found(*options)
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    assert [check["subject"] for check in checks if check["level"] == "fail"] == [f"redis {bad.host}:{bad.port}"]


@pytest.fixture
def bucket(moto_server: servers.S3Server, s3_env: None) -> Iterator[tuple[Any, str]]:
    """A client, and a bucket of its own to misconfigure."""
    name = f"doctor-{uuid.uuid4().hex}"
    with closing(moto_server.client()) as client:
        client.create_bucket(Bucket=name)
        yield client, name


def at(server: servers.S3Server | FaultyProxy, bucket: str, prefix: str = "team/fences") -> tuple[str, str]:
    return "--objects", f"s3://{bucket}/{prefix}?endpoint_url={server.url}&region={servers.S3_REGION}"


def test_a_healthy_bucket_is_all_ok(moto_server: servers.S3Server, bucket: tuple[Any, str]) -> None:
    checks = found(*at(moto_server, bucket[1]), "--strict")
    assert [check["text"] for check in checks if check["subject"] == "s3"][1:] == [
        *("versioning is off", "no lifecycle rule takes objects away (0 rules)")
    ]
    assert level_of(checks, "conditional writes work") == "ok"


def test_versioning_is_looked_at(moto_server: servers.S3Server, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    for status, level in (("Enabled", "ok"), ("Suspended", "warn")):
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": status})
        assert level_of(found(*at(moto_server, name)), "versioning is ") == level


@pytest.mark.parametrize(
    ("rule", "level"),
    [
        ({"ID": "tidy", "Filter": {"Prefix": "team/"}, "Expiration": {"Days": 30}}, "fail"),
        ({"ID": "tidy", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}, "fail"),
        (
            {
                "ID": "tidy",
                "Filter": {"Prefix": ""},
                "Transitions": [{"Days": 30, "StorageClass": "DEEP_ARCHIVE"}],
            },
            "fail",
        ),
        ({"ID": "tidy", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 30}}, "ok"),
        (
            {
                "ID": "tidy",
                "Filter": {"Prefix": ""},
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
                "NoncurrentVersionExpiration": {"NoncurrentDays": 7},
            },
            "ok",
        ),
        (
            {
                "ID": "tidy",
                "Filter": {"And": {"Prefix": "", "Tags": [{"Key": "tmp", "Value": "1"}]}},
                "Expiration": {"Days": 1},
            },
            "ok",
        ),
    ],
)
def test_a_lifecycle_rule_that_would_unseal_is_named(
    moto_server: servers.S3Server, bucket: tuple[Any, str], rule: dict[str, Any], level: str
) -> None:
    client, name = bucket
    client.put_bucket_lifecycle_configuration(
        Bucket=name, LifecycleConfiguration={"Rules": [{**rule, "Status": "Enabled"}]}
    )
    checks = found(*at(moto_server, name))
    assert level_of(checks, "lifecycle rule") == level
    assert (level == "ok") != any("'tidy'" in text for text in fails(checks))


class Forbidding(FaultyProxy):
    """Lets everything pass but questions about the configuration of the bucket."""

    def take(self, method: str, target: str, headers: Any) -> Fault:
        if target.endswith(("?lifecycle", "?versioning")):
            return Fault.answer(403)
        return super().take(method, target, headers)


def test_what_may_not_be_looked_at_is_a_warning_that_names_the_right(
    moto_server: servers.S3Server, bucket: tuple[Any, str]
) -> None:
    with Forbidding(moto_server.url) as proxy:
        checks = found(*at(proxy, bucket[1]))
    assert level_of(checks, "could not look at the versioning") == "warn"
    assert level_of(checks, "could not look at the lifecycle rules") == "warn"
    advice = " ".join(check["advice"] or "" for check in checks)
    assert "s3:GetLifecycleConfiguration" in advice
    assert "s3:GetBucketVersioning" in advice


def test_a_bucket_that_is_not_there_or_not_reachable_is_found(moto_server: servers.S3Server, s3_env: None) -> None:
    perform_embedded()
    checks = found(*at(moto_server, "nobody-made-this"))
    assert "has no bucket" in fails(checks)[0]
    assert level_of(checks, "journal_mode is wal") == "ok"
    (port,) = servers.free_ports(1)
    (text,) = fails(found("--objects", f"s3://b/p?endpoint_url=http://127.0.0.1:{port}"))
    assert "cannot" in text


def test_a_server_without_conditional_writes_is_found(s3_env: None) -> None:
    perform_embedded()
    with lying("ignores If-None-Match") as server:
        checks = found("--objects", f"s3://bucket/p?endpoint_url={server.url}")
    (text,) = fails(checks)
    assert "ignores If-None-Match" in text
    assert level_of(checks, "journal_mode is wal") == "ok"


def perform_embedded() -> None:
    with ragfence.open() as fence, fence.claim(Operation(kind="ticket", source_id="a")) as op:
        op.seal()


def test_a_real_s3_server_is_understood(seaweed_server: servers.S3Server, s3_env: None) -> None:
    checks = found(*at(seaweed_server, seaweed_server.bucket, f"d{uuid.uuid4().hex}"))
    assert fails(checks) == []
    assert level_of(checks, "conditional writes work") == "ok"
