"""Processes that send the same documents at the same moment: each is chunked once, and all get the same ids.

Chunkings are counted by the chunker itself, in files that ragfence knows nothing of. Nobody's lease runs out here, so
whoever comes second waits, and the count is exact. On SeaweedFS there are fewer documents here; `python -m tests.chaos
--only "same documents"` has all of them.
"""

from __future__ import annotations

import pytest

from tests.chaos.crew import Nursery
from tests.chaos.sites import SQLITE, VALKEY_FOLDER, VALKEY_S3
from tests.documents.attack.conftest import OpenSite
from tests.documents.attack.corpus import expected, parts
from tests.documents.attack.crew import DocumentCrew
from tests.documents.attack.judge import judge

pytestmark = pytest.mark.xdist_group("many processes")


@pytest.mark.parametrize("processes", [2, 8])
@pytest.mark.parametrize(("backend", "count"), [(SQLITE, 1000), (VALKEY_FOLDER, 1000), (VALKEY_S3, 300)])
def test_every_document_is_chunked_once_and_all_processes_get_the_same_ids(
    backend: str, count: int, processes: int, nursery: Nursery, open_site: OpenSite
) -> None:
    site = open_site(backend)
    sent = parts(count, batch=100)
    with DocumentCrew(nursery, site) as crew:
        crew.run(*[sent] * processes)
        found = judge(site, crew, expected(sent))
    assert found.problems == []
    assert found.errors == {}
    assert len(found.chunkings) == found.chunkings.total() == count
    assert found.answers == count * processes
    assert found.decisions == {"new": count, "duplicate": count * (processes - 1)}
    assert len(found.live) == count
