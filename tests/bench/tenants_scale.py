"""How much of everything is measured in part 7."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsScale:
    rounds: int
    seconds: float
    """for which the other tenant is measured, in every round: alone, attacked, and beside an unrelated process"""
    lead_s: float = 1.0
    """for which an attack, or what burns as much, goes on before that"""
    per_s: int = 20
    """documents that it sends in a second, and as many that it reads"""
    slow_bodies: int = 210
    byte_every_s: float = 0.1
    """of each slow body"""
    builds: int = 60
    """requests for a build that are under way at the same time"""
    built: int = 2_000
    """documents of the tenant that builds"""
    refused_s: float = 0.5
    """after which a build that was refused is asked for again"""
    bodies: int = 4
    """connections that send bodies of 4 MB, one after the other"""

    @property
    def is_full(self) -> bool:
        return self.rounds >= 7 and self.seconds >= 10 and self.slow_bodies >= 210 and self.builds >= 60


FULL = TenantsScale(rounds=7, seconds=10)
QUICK = TenantsScale(rounds=3, seconds=5, built=500)
