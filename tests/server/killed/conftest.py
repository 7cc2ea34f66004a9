"""One process per test session that forks all servers, and sites for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.crew import Nursery
from tests.chaos.sites import VALKEY_S3, Site, site
from tests.server.killed.places import cradle

OpenSite = Callable[[str], Site]


@pytest.fixture(scope="session")
def servers_cradle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with cradle(tmp_path_factory.mktemp("cradle")) as made:
        yield made


@pytest.fixture
def open_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenSite]:
    with ExitStack() as stack:

        def opened(backend: str) -> Site:
            s3 = request.getfixturevalue("seaweed_server") if backend == VALKEY_S3 else None
            return stack.enter_context(site(backend, tmp_path, s3=s3))

        yield opened
