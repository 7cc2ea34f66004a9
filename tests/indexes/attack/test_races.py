"""Builders, and who edits, purges and searches at the same time, each in a process of its own."""

from __future__ import annotations

from itertools import product

import pytest

from ragfence.indexes.build import BUILD_POINTS
from tests.chaos.sites import SQLITE, VALKEY_FOLDER
from tests.documents.attack.conftest import OpenSite
from tests.indexes.attack.conftest import OpenCrew
from tests.indexes.attack.races import ingested_meanwhile, purged_at, purged_meanwhile, searched_meanwhile

SEARCHES = 5_000
EVERY_TIME = {"mid_embed", "after_vectors", "mid_write", "before_sealing"}
"""where a purge finds a builder in every run; at the others in `make slow`"""
STANDING_STILL = [
    pytest.param(*each, marks=[] if each[0] in EVERY_TIME else [pytest.mark.slow])
    for each in product(BUILD_POINTS, ("kill", "freeze"))
]


@pytest.mark.parametrize("seed", range(3))
def test_a_document_purged_while_others_build_is_in_no_index_and_no_file(
    seed: int, open_site: OpenSite, open_crew: OpenCrew
) -> None:
    site = open_site(SQLITE)
    assert purged_meanwhile(site, open_crew(site), seed).problems == []


@pytest.mark.parametrize(("point", "action"), STANDING_STILL)
def test_a_document_purged_while_a_builder_stands_still_is_in_no_index_and_no_file(
    point: str, action: str, open_site: OpenSite, open_crew: OpenCrew
) -> None:
    site = open_site(SQLITE)
    assert purged_at(site, open_crew(site), action, point).problems == []


@pytest.mark.parametrize("backend", [SQLITE, VALKEY_FOLDER])
def test_every_build_is_the_snapshot_that_its_hash_names_whatever_is_ingested_meanwhile(
    backend: str, open_site: OpenSite, open_crew: OpenCrew
) -> None:
    site = open_site(backend)
    found = ingested_meanwhile(site, open_crew(site), edits=20, builds=6)
    assert found.problems == []
    assert len(found.sealed) > 1
    assert set(found.embeds.values()) == {1}


def test_searches_see_one_sealed_build_each_while_the_alias_moves(open_site: OpenSite, open_crew: OpenCrew) -> None:
    site = open_site(SQLITE)
    found = searched_meanwhile(site, open_crew(site), searches=SEARCHES, swaps=12)
    assert found.problems == []
    assert len(found.sealed) == 13
