"""A process is killed or frozen at each point of a batch; another takes over, and nothing is lost or doubled.

The batch that is struck is the second of three. What must be chunked again is what nobody had sealed when the lease
ran out: all of the batch, half of it in the middle of a seal, nothing after it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from ragfence.engine.crash_points import AFTER_CLAIM, AFTER_SEAL
from tests.chaos.crew import Nursery
from tests.chaos.sites import SQLITE, VALKEY_FOLDER
from tests.chaos.work import Strike
from tests.documents.attack.conftest import OpenSite
from tests.documents.attack.corpus import expected, parts
from tests.documents.attack.crew import DocumentCrew
from tests.documents.attack.judge import judge
from tests.documents.attack.strikes import STRIKES
from tests.documents.attack.work import MID_SEAL

COUNT, BATCH, STRUCK = 30, 10, 1
LEASE_S = 0.5


def twice(point: str, action: str) -> int:
    """How many documents of the struck batch are chunked by two processes."""
    if point == AFTER_SEAL or (point == AFTER_CLAIM and action == "kill"):
        return 0
    return BATCH // 2 if point == MID_SEAL else BATCH


@pytest.mark.parametrize("backend", [SQLITE, VALKEY_FOLDER])
@pytest.mark.parametrize("action", ["kill", "freeze"])
@pytest.mark.parametrize("point", STRIKES)
def test_nothing_is_lost_or_doubled_whoever_stops_where(
    point: str, action: str, backend: str, nursery: Nursery, open_site: OpenSite
) -> None:
    site = open_site(backend)
    sent = parts(COUNT, batch=BATCH)
    site.prepare()
    with DocumentCrew(nursery, site, lease_s=LEASE_S) as crew:
        victims = crew.start(sent, strike=Strike(action, point, task=STRUCK))
        crew.wait_struck(victims)
        crew.run(sent)  # waits until the lease has run out, and takes over
        for victim in victims:
            if victim.frozen:
                victim.wake()
        crew.wait(victims)
        found = judge(site, crew, expected(sent))
        assert found.problems == []
        again = Counter(times for times in found.chunkings.values())
        assert again == Counter({1: COUNT - twice(point, action), 2: twice(point, action)}) - Counter()
        struck_batch = {f"doc-{number:04d}" for number in sent[STRUCK].numbers}
        assert {name for (name, _), times in found.chunkings.items() if times > 1} <= struck_batch

        # Only what was committed counts, and it is enough: the fence store forgets everything that was sealed.
        site.forget()
        crew.run(sent)
        after = judge(site, crew, expected(sent))
        assert after.problems == []
        assert after.chunkings == found.chunkings
