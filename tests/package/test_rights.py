"""The rights that docs/operations.md asks for are enough, and no more is used."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.stores.s3 import S3Objects
from tests import servers

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
ALWAYS, CLUSTER, DURABILITY = re.findall(r"^ACL SETUSER ragfence (.+)$", PAGE, re.M)

# Which right each request needs, from the documentation of IAM for S3.
RIGHTS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
}


@pytest.mark.parametrize("server", ["valkey_server", "redis62_server"])
def test_a_user_with_exactly_these_rights_can_do_everything(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    running: servers.RedisServer = request.getfixturevalue(server)
    with _user([running], ALWAYS):
        _do_everything(running.url.replace("redis://", "redis://ragfence:pw@"), tmp_path)


def test_and_on_a_cluster_with_two_more(valkey_cluster_server: servers.RedisCluster, tmp_path: Path) -> None:
    with _user(valkey_cluster_server.nodes, f"{ALWAYS} {CLUSTER}"):
        _do_everything(valkey_cluster_server.url.replace("://", "://ragfence:pw@"), tmp_path)


def test_and_for_confirmed_seals_with_two_more(tmp_path: Path) -> None:
    rules = ragfence.Policy.from_mapping({"durability": {"wait_aof": True}})
    with servers.valkey(appendonly=True) as running, _user([running], f"{ALWAYS} {DURABILITY}"):
        _do_everything(running.url.replace("redis://", "redis://ragfence:pw@"), tmp_path, policy=rules)


def test_the_iam_policy_allows_what_is_asked_of_s3_and_nothing_else(
    moto_server: servers.S3Server, valkey_server: servers.RedisServer, tmp_path: Path
) -> None:
    made: set[str] = set()
    with contextlib.closing(moto_server.client()) as client:
        client.meta.events.register("before-call.s3.*", lambda model, **_: made.add(model.name))
        objects = S3Objects(moto_server.bucket, "iam", client=client)
        with valkey_server.client() as admin:
            admin.flushall()
        with ragfence.open(valkey_server.url, objects=objects, tenant="iam", journal=tmp_path) as fence:
            _use(fence)
            fence.hydrate()
            fence.purge_expired()
        objects.delete([entry.name for entry in objects.list("iam/")])
    (text,) = re.findall(r"```json\n(.+?)```", PAGE, re.S)
    allowed: set[str] = set()
    for statement in json.loads(text)["Statement"]:
        actions = statement["Action"]
        allowed |= set(actions) if isinstance(actions, list) else {actions}
    assert {RIGHTS[name] for name in made} == allowed


def _do_everything(url: str, folder: Path, policy: ragfence.Policy | None = None) -> None:
    for objects in (None, folder / "objects"):
        tenant = f"rights-{objects is None}"
        with ragfence.open(url, objects=objects, tenant=tenant, journal=folder, policy=policy) as fence:
            _use(fence)
            store = fence.inspector.fences
            assert store.stats().records
            assert len(list(store.scan())) == 3
            assert fence.audit.check().ok
            assert fence.audit.decisions().num_rows
            fence.purge_expired()
            if objects is not None:
                fence.hydrate()


def _use(fence: ragfence.Fence) -> None:
    effect = fence.once(kind="ticket", key=lambda number: str(number))(lambda number: number)
    assert effect(1) == effect(1)
    with fence.claim(ragfence.Operation(kind="webhook", source_id="a", sequence=1)) as op:
        op.seal()

    @fence.once(kind="ticket", key=lambda number: f"failing {number}")
    def failing(number: int) -> None:
        raise ragfence.errors.TerminalError("no")

    with pytest.raises(ragfence.errors.TerminalError):
        failing(1)
    assert fence.release(ragfence.Operation(kind="ticket", source_id="failing 1"))
    with pytest.raises(ragfence.errors.TerminalError):
        failing(1)


@contextlib.contextmanager
def _user(nodes: Any, rules: str) -> Iterator[None]:
    for node in nodes:
        with node.client() as admin:
            admin.flushall()
            admin.execute_command("ACL", "SETUSER", "ragfence", "reset", *rules.replace(">secret", ">pw").split())
    try:
        yield
    finally:
        for node in nodes:
            with node.client() as admin:
                admin.execute_command("ACL", "DELUSER", "ragfence")
