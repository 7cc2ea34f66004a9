"""Which drills there are, and what each must come to."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.attacks import Attack
from tests.chaos.scenarios import Outcome, Scenario
from tests.chaos.sites import CLUSTER_FOLDER, PAIR, PAIR_FOLDER, TWO_REGIONS, VALKEY_FOLDER, VALKEY_FSYNC
from tests.drills import faults
from tests.drills.faults import Callers

FAILOVER, NODES, DOWN, REGIONS = "Sentinel failover", "cluster loses nodes", "Redis is down", "two regions"


@dataclass(frozen=True, slots=True)
class Drill:
    """`judged`: nothing may be double, lost or stuck. What is not judged is counted, and reported as it is."""

    title: str
    variant: str
    backend: str
    attack: Attack
    judged: bool = True
    accounted: bool = False
    """doubles may happen, if each of them is reported by the journal"""

    @property
    def tolerant(self) -> bool:
        return not self.judged or self.accounted

    @property
    def scenario(self) -> Scenario:
        return Scenario(f"{self.title}: {self.variant}", self.backend, self.attack, may_lose=not self.judged)

    @property
    def name(self) -> str:
        return self.scenario.name


@dataclass(frozen=True, slots=True)
class Result:
    drill: Drill
    outcome: Outcome

    @property
    def faults(self) -> int:
        return len(self.outcome.outages)

    @property
    def answered(self) -> int:
        """Calls that got an answer: a receipt, or that they are stale."""
        return len(self.outcome.evidence.spans)

    @property
    def answered_meanwhile(self) -> int:
        """... while something was away."""
        times = [at_s for _, at_s in self.outcome.evidence.spans]
        return sum(outage.since_s <= at_s <= outage.until_s for outage in self.outcome.outages for at_s in times)

    @property
    def longest_wait_s(self) -> float:
        """From the question to its answer, over all retries: the longest outage that any caller saw."""
        return max((at_s - asked_s for asked_s, at_s in self.outcome.evidence.spans), default=0.0)

    @property
    def ok(self) -> bool:
        found = self.outcome.evidence
        if found.problems or found.pending:
            return False
        return self.drill.tolerant or not (found.double or found.lost)


def all_drills(*, short: bool) -> list[Drill]:
    """The short ones are the same drills, with fewer faults."""
    kills, freezes = (2, 1) if short else (20, 6)
    away_s, downs = (3.0, 1) if short else (10.0, 3)
    waiting = Callers(policy={"durability": {"wait_replicas": 1}})
    opened = Callers(policy={"on_store_error": "open"}, journals=True, moves=False)
    return [
        Drill(FAILOVER, "SIGKILL, objects", PAIR_FOLDER, faults.primary_lost(kills)),
        Drill(FAILOVER, "SIGKILL, Redis alone", PAIR, faults.primary_lost(kills), judged=False),
        Drill(
            FAILOVER,
            "SIGKILL, Redis alone, wait_replicas: 1",
            PAIR,
            faults.primary_lost(kills, callers=waiting),
            judged=False,
        ),
        Drill(FAILOVER, "SIGSTOP, objects", PAIR_FOLDER, faults.primary_lost(freezes, action="freeze")),
        Drill(NODES, "SIGKILL and SIGSTOP, objects", CLUSTER_FOLDER, _nodes(short=short)),
        Drill(DOWN, f"{away_s:.0f} s, closed, objects", VALKEY_FOLDER, faults.server_down(away_s, times=downs)),
        Drill(DOWN, f"{away_s:.0f} s, closed, Redis alone", VALKEY_FSYNC, faults.server_down(away_s, times=downs)),
        Drill(
            DOWN,
            f"{away_s:.0f} s, open, objects",
            VALKEY_FOLDER,
            faults.server_down(away_s, times=downs, callers=opened),
            accounted=True,
        ),
        Drill(REGIONS, "one is lost and returns, objects", TWO_REGIONS, faults.region_lost(1 if short else 4)),
    ]


def _nodes(*, short: bool) -> Attack:
    return faults.node_lost(kills=1, freezes=1) if short else faults.node_lost(kills=6, freezes=3)
