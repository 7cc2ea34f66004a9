"""Processes that build at the same moment: one build runs, each snippet is embedded once, all are told the same.

Embeddings are counted by the embedder itself, in a file that ragfence knows nothing of. Nobody's lease runs out here,
so the count is exact. On SeaweedFS the objects and LanceDB's tables are both on S3.
"""

from __future__ import annotations

import pytest

from tests.chaos.sites import SQLITE, VALKEY_FOLDER, VALKEY_S3
from tests.documents.attack.conftest import OpenSite
from tests.indexes.attack.conftest import OpenCrew
from tests.indexes.attack.corpus import PARAGRAPHS, groups, prepared
from tests.indexes.attack.judge import judge, swept
from tests.indexes.attack.work import build

pytestmark = pytest.mark.xdist_group("many builders")


@pytest.mark.parametrize(("backend", "count"), [(SQLITE, 60), (VALKEY_FOLDER, 60), (VALKEY_S3, 12)])
def test_eight_processes_build_at_once_and_one_build_runs(
    backend: str, count: int, open_site: OpenSite, open_crew: OpenCrew
) -> None:
    site = open_site(backend)
    crew = open_crew(site)
    prepared(site, groups(6, count // 6))
    crew.run(*[[build()]] * 8)
    found = judge(site, crew)
    swept(site, found)
    assert found.problems == []
    assert (len(found.embeds), found.embeds.total()) == (count * PARAGRAPHS, count * PARAGRAPHS)
    assert (found.answers, len(found.hashes), len(found.receipts)) == (8, 1, 1)
    assert found.decisions == {"new": 1, "duplicate": 7}
    assert not found.errors


def test_two_specs_with_one_embedder_embed_each_snippet_once(open_site: OpenSite, open_crew: OpenCrew) -> None:
    site = open_site(SQLITE)
    crew = open_crew(site)
    prepared(site, groups(8, 4))
    crew.run(*[[build(metric=metric)] for metric in ("cosine", "l2") * 2])
    found = judge(site, crew)
    assert found.problems == []
    assert len(found.embeds) == found.embeds.total() == 8 * 4 * PARAGRAPHS
    assert (found.answers, len(found.hashes)) == (4, 2)
    assert found.decisions == {"new": 2, "duplicate": 2}
