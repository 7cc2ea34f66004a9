"""Sites, and the process that forks the workers, as for documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.chaos.crew import Crew, Nursery
from tests.chaos.sites import Site
from tests.documents.attack.conftest import nursery, open_site
from tests.indexes.attack.crew import IndexCrew

__all__ = ["nursery", "open_site"]

OpenCrew = Callable[..., IndexCrew]


@pytest.fixture
def open_crew(nursery: Nursery) -> Iterator[OpenCrew]:
    """Crews whose processes are ended with the test. A lease that nobody loses is long."""
    crews: list[Crew] = []

    def made(site: Site, *, lease_s: float = 30.0) -> IndexCrew:
        crews.append(Crew(nursery, site, lease_s=lease_s))
        return IndexCrew(crews[-1], site)

    yield made
    for crew in crews:
        crew.end()
