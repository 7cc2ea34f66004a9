"""A builder is killed or frozen at each point of a build; others finish it, and nothing is made again or left behind.

No object of vectors that was put is made again, and one at most that was not. Whoever is frozen beyond its lease and
wakes up is told what everybody is told, and what it wrote is in no sealed build and gone.
"""

from __future__ import annotations

from itertools import product

import pytest

from ragfence.indexes.build import AFTER_SEALING, BEFORE_SEALING, MID_WRITE
from ragfence.indexes.vectors import MID_EMBED
from tests.chaos.sites import SQLITE, VALKEY_FOLDER
from tests.documents.attack.conftest import OpenSite
from tests.indexes.attack.conftest import OpenCrew
from tests.indexes.attack.strikes import STRIKES, strike

LEASE_S = 0.6
EVERY_TIME = {MID_EMBED, MID_WRITE, BEFORE_SEALING, AFTER_SEALING}
"""where builders are frozen in every run; at the other points they are killed, and frozen by `make slow`"""
STOPS = [
    pytest.param(*each, marks=[] if each[1] == "kill" or each[0] in EVERY_TIME else [pytest.mark.slow])
    for each in product(STRIKES, ("kill", "freeze"))
]
ANSWERS = {"kill": 2, "freeze": 3}


@pytest.mark.parametrize(("point", "action"), STOPS)
def test_another_finishes_what_a_builder_was_at_wherever_it_stopped(
    point: str, action: str, open_site: OpenSite, open_crew: OpenCrew
) -> None:
    # Both fence stores, without twice the time: `make chaos` has every point on each.
    site = open_site((SQLITE, VALKEY_FOLDER)[STRIKES.index(point) % 2])
    found = strike(site, open_crew(site, lease_s=LEASE_S), action, point)
    assert found.problems == []
    assert (found.answers, len(found.hashes), len(found.receipts)) == (ANSWERS[action], 1, 1)
