"""Runs in real processes on Valkey and SeaweedFS: doubled, killed, retried, cancelled.

Embeddings are counted by the embedder, in a file that ragfence knows nothing of. Nothing that was committed is done
again: one build, one swap, every text embedded once; a kill may cost one object of vectors that was not put yet.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfence.engine.crash_points import AFTER_COMMIT
from ragfence.indexes.aliases import AFTER_CATALOG
from ragfence.indexes.build import BEFORE_SEALING
from ragfence.indexes.vectors import AFTER_EMBEDDED
from tests.chaos.crew import until
from tests.chaos.sites import VALKEY_S3, Site, site
from tests.dagster.crew import EACH, FOLDERS, Crew, Nursery, Process, judged
from tests.servers import S3Server

pytestmark = [pytest.mark.usefixtures("s3_env"), pytest.mark.xdist_group("seaweedfs")]

DOCUMENTS = EACH * len(FOLDERS)
KILL_LEASE_S = 1.0


@pytest.fixture
def place(tmp_path: Path, seaweed_server: S3Server) -> Iterator[Site]:
    with site(VALKEY_S3, tmp_path, s3=seaweed_server) as made:
        made.prepare()
        yield made


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.end()


@pytest.fixture
def crew(nursery: Nursery, place: Site) -> Iterator[Crew]:
    made = Crew(nursery, place)
    yield made
    made.end()


def succeeded(processes: list[Process]) -> list[dict[str, Any]]:
    """What each of them was told."""
    for each in processes:
        assert each.status == 0, each.said()
    return [each.answer["told"] for each in processes]


def documents_in(told: list[dict[str, Any]]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for each in told:
        for name in FOLDERS:
            counted.update({row["decision"]: row["documents"] for row in each[name]["decisions"]})
    return counted


def test_two_runs_of_the_same_job_at_once_do_the_work_of_one(place: Site, crew: Crew) -> None:
    told = succeeded(crew.run(2))
    assert judged(place, crew) == []
    assert documents_in(told) == {"new": DOCUMENTS, "duplicate": DOCUMENTS}
    assert sorted(each["vector_index"]["decision"] for each in told) == ["duplicate", "new"]
    assert sorted(each["live_alias"]["changed"] for each in told) == [False, True]
    assert {each["live_alias"]["generation"] for each in told} == {1}
    assert len({each["vector_index"]["index_hash"] for each in told}) == 1


@pytest.mark.parametrize(
    ("point", "again"),
    [
        (AFTER_COMMIT, 0),
        (AFTER_EMBEDDED, 1),
        pytest.param(BEFORE_SEALING, 0, marks=pytest.mark.slow),
        pytest.param(AFTER_CATALOG, 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_and_retried_goes_on_where_it_was(place: Site, crew: Crew, point: str, again: int) -> None:
    (killed,) = crew.run(kill_at=point, lease_s=KILL_LEASE_S)
    assert killed.status == -signal.SIGKILL, killed.said()
    (told,) = succeeded(crew.run(home=killed.job.home, lease_s=KILL_LEASE_S))
    assert judged(place, crew, again=again) == []
    index, alias = told["vector_index"], told["live_alias"]
    if point in (AFTER_EMBEDDED, BEFORE_SEALING):
        assert (index["decision"], index["attempt"], index["takeover"]) == ("new", 2, True)
    if point == AFTER_CATALOG:
        assert (index["decision"], index["embedded"], alias["changed"]) == ("duplicate", 0, False)


def test_retries_of_a_step_do_nothing_again_that_was_done(place: Site, crew: Crew) -> None:
    (told,) = succeeded(crew.run(retries=3, fails=2))
    assert judged(place, crew) == []
    assert (told["vector_index"]["decision"], told["vector_index"]["attempt"]) == ("new", 3)
    assert told["live_alias"]["generation"] == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_cancelled_frees_its_claims_at_once(place: Site, crew: Crew, how: signal.Signals) -> None:
    hold = place.folder / "held"
    (cancelled,) = crew.start(hold=str(hold), lease_s=600.0)
    until(hold.exists, "it embeds")
    cancelled.send(how)
    hold.unlink()  # nothing interrupts an embedder: it ends its call, in a thread of its own
    crew.wait([cancelled])
    assert cancelled.status != 0
    # Whoever met a lease that is still held would not wait for it, but fail.
    (told,) = succeeded(crew.run(wait=False, lease_s=600.0))
    assert judged(place, crew, again=1) == []
    assert told["vector_index"]["decision"] == "new"
    assert "takeover" not in told["vector_index"]
