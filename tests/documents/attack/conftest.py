"""Sites for the attack, and one process per test session that forks all of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos import crew
from tests.chaos.sites import VALKEY_S3, Site, site
from tests.documents.attack.places import Place, in_folder
from tests.machine.lineages import RedisLineages

OpenSite = Callable[[str], Site]


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[crew.Nursery]:
    with crew.nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def open_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenSite]:
    with ExitStack() as stack:

        def opened(backend: str) -> Site:
            s3 = request.getfixturevalue("seaweed_server") if backend == VALKEY_S3 else None
            if s3 is not None:
                request.getfixturevalue("s3_env")
            return stack.enter_context(site(backend, tmp_path, s3=s3))

        yield opened


@pytest.fixture(params=["valkey_server", "redis62_server"], ids=["valkey", "redis6.2"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A Redis that can be flushed, with a clock that is moved by hand, and a folder for the objects."""
    made = in_folder(RedisLineages(request.getfixturevalue(request.param).url), tmp_path)
    yield made
    made.close()
