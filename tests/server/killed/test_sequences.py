"""Sequences of requests while the server is killed and started again: one effect per key, equal answers."""

from __future__ import annotations

import os

import pytest

from tests.chaos.crew import Nursery
from tests.chaos.sites import SQLITE, VALKEY_S3
from tests.server.killed.conftest import OpenSite
from tests.server.killed.places import Place
from tests.server.killed.running import run
from tests.server.killed.sequences import Plan

FIRST = int(os.environ.get("RAGFENCE_SEED", "1"))
EMBEDDED = 8
ON_SERVERS = 2


def check(plan: Plan, backend: str, open_site: OpenSite, nursery: Nursery) -> None:
    found = run(plan, Place(open_site(backend)), nursery)
    print(found)
    assert found.problems == []
    assert (found.double, found.lost) == (0, 0)
    assert found.kills > 0


@pytest.mark.parametrize("seed", range(FIRST, FIRST + EMBEDDED))
def test_one_effect_per_key_and_equal_answers_whenever_the_server_is_killed(
    seed: int, open_site: OpenSite, servers_cradle: Nursery
) -> None:
    """Every request is performed once, answered alike, and refused only where its key is of another one."""
    check(Plan(seed, steps=6), SQLITE, open_site, servers_cradle)


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
@pytest.mark.parametrize("seed", range(FIRST + EMBEDDED, FIRST + EMBEDDED + ON_SERVERS))
def test_one_effect_per_key_on_redis_and_s3_too(seed: int, open_site: OpenSite, servers_cradle: Nursery) -> None:
    check(Plan(seed, steps=4), VALKEY_S3, open_site, servers_cradle)


@pytest.mark.slow
def test_an_index_is_built_once_and_an_alias_swapped_once(open_site: OpenSite, servers_cradle: Nursery) -> None:
    """Every server that is started for it imports LanceDB, which takes seconds."""
    check(Plan(FIRST, steps=2, builds=2), SQLITE, open_site, servers_cradle)
