"""The ACL in docs/operations.md is enough, and is what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

import ragfence

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()


@pytest.mark.parametrize("server", ["valkey_server", "redis62_server"])
def test_a_user_with_exactly_these_rights_can_do_everything(server, request, tmp_path):
    running = request.getfixturevalue(server)
    (rules,) = re.findall(r"^ACL SETUSER ragfence (.+)$", PAGE, re.M)
    with redis.Redis.from_url(running.url) as admin:
        admin.flushall()
        admin.execute_command("ACL", "SETUSER", "ragfence", "reset", *rules.replace(">secret", ">pw").split())
    url = running.url.replace("redis://", "redis://ragfence:pw@")
    try:
        for objects in (None, tmp_path / "objects"):
            with ragfence.open(url, objects=objects, tenant=f"t{objects is None}", journal=tmp_path) as fence:
                effect = fence.once(kind="ticket", key=lambda number: str(number))(lambda number: number)
                assert effect(1) == effect(1)
                with fence.claim(ragfence.Operation(kind="webhook", source_id="a", sequence=1)) as op:
                    op.seal()
                store = fence._engine.fences
                assert store.stats().records
                assert len(list(store.scan())) == 2
                assert fence.audit.check().ok
                assert fence.audit.decisions().num_rows
                if objects is not None:
                    fence.hydrate()
    finally:
        with redis.Redis.from_url(running.url) as admin:
            admin.execute_command("ACL", "DELUSER", "ragfence")
