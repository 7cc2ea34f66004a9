"""Two versions of the same documents, sent by two processes at the same moment."""

from __future__ import annotations

import pytest

from tests.chaos.crew import Nursery
from tests.chaos.sites import SQLITE, VALKEY_FOLDER
from tests.documents.attack.conftest import OpenSite
from tests.documents.attack.corpus import expected, parts
from tests.documents.attack.crew import DocumentCrew
from tests.documents.attack.judge import judge

pytestmark = pytest.mark.xdist_group("many processes")


@pytest.mark.parametrize("backend", [SQLITE, VALKEY_FOLDER])
def test_every_document_ends_with_one_whole_revision_and_a_quiet_run_decides_which(
    backend: str, nursery: Nursery, open_site: OpenSite
) -> None:
    """Each of the two sends its version twice: both go on moving heads that the other one has just moved."""
    site, count = open_site(backend), 1000
    first, second = parts(count, batch=100, revision="v1"), parts(count, batch=100, revision="v2")
    with DocumentCrew(nursery, site) as crew:
        crew.run(first, second, rounds=2)
        raced = judge(site, crew, expected([*first, *second]), revisions=("v1", "v2"))
        assert raced.problems == []
        assert raced.errors == {}
        assert len(raced.live) == count
        assert (
            raced.chunkings.total() == len(raced.chunkings) == 2 * count
        )  # also those that came back are not cut again

        crew.run(second)
        quiet = judge(site, crew, expected([*first, *second]), revisions=("v2",))
        assert quiet.problems == []
        assert set(quiet.live.values()) == {"v2"}
        assert quiet.chunkings == raced.chunkings

        site.forget()
        crew.run(second)
        remembered = judge(site, crew, expected([*first, *second]), revisions=("v2",))
        assert remembered.problems == []
        assert remembered.chunkings == raced.chunkings
