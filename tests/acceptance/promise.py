"""One line of the table: what is promised, what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    KEPT = "kept"
    BROKEN = "BROKEN"
    MISSED = "MISSED"
    """a goal of speed; nothing is wrong"""
    SHOWN = "shown"
    """a figure without a goal"""


@dataclass(frozen=True, slots=True)
class Promise:
    what: str
    workload: str
    wanted: str
    measured: str
    verdict: Verdict


def kept(what: str, workload: str, wanted: str, measured: str, held: bool) -> Promise:
    return Promise(what, workload, wanted, measured, Verdict.KEPT if held else Verdict.BROKEN)


def aimed(what: str, workload: str, wanted: str, measured: str, held: bool) -> Promise:
    return Promise(what, workload, wanted, measured, Verdict.KEPT if held else Verdict.MISSED)


def shown(what: str, workload: str, measured: str) -> Promise:
    return Promise(what, workload, "", measured, Verdict.SHOWN)
