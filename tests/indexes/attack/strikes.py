"""Where a builder can be killed or frozen: at the points of a build, and of the engine, for its vectors and for it."""

from __future__ import annotations

from ragfence.engine.crash_points import AFTER_COMMIT, AFTER_SEAL, BEFORE_SEAL
from ragfence.indexes.build import AFTER_SEALING, BUILD_POINTS, MID_WRITE
from ragfence.indexes.vectors import AFTER_EMBEDDED, MID_EMBED
from tests.chaos.crew import Worker
from tests.chaos.sites import Site
from tests.chaos.work import Strike
from tests.indexes.attack.corpus import groups, prepared, texts_of
from tests.indexes.attack.crew import IndexCrew
from tests.indexes.attack.judge import Verdict, judge, physicals, swept, vector_objects
from tests.indexes.attack.work import OF_THE_BUILD, build

ENGINE_POINTS = (AFTER_COMMIT, BEFORE_SEAL, AFTER_SEAL)
STRIKES = (*BUILD_POINTS, *ENGINE_POINTS, *(OF_THE_BUILD + point for point in ENGINE_POINTS))
SEALED_BY_THEN = (AFTER_SEALING, *(OF_THE_BUILD + point for point in ENGINE_POINTS))


def strike(site: Site, crew: IndexCrew, action: str, point: str, *, segments: int = 4, size: int = 3) -> Verdict:
    """One builder stops at the point, others finish what it was at, and it wakes up if it can.

    With one thread that embeds: what was embedded and not put when it stopped is one object at most.
    """
    names = groups(segments, size)
    prepared(site, names)
    victims = crew.start([build()], strike=Strike(action, point), embed_workers=1)
    crew.crew.wait_struck(*victims)
    committed = vector_objects(site)
    embedded = crew.embeds()
    crew.run([build()], [build()], embed_workers=1)
    in_time = set(physicals(site))
    crew.wake(victims)
    found = judge(site, crew)
    after = vector_objects(site)
    found.problems += [f"{name} was made again" for name, data in committed.items() if after.get(name) != data]
    if len(after) != segments:
        found.problems.append(f"{len(after)} objects of vectors for {segments} segments")
    _judge_embeds(found, action, point, names)
    if once := {text for text in embedded if embedded[text] > 1}:
        found.problems.append(f"embedded twice before the strike: {sorted(once)[:3]}")
    _judge_rows(site, found, victims, in_time, point)
    swept(site, found)
    return found


def _judge_embeds(found: Verdict, action: str, point: str, names: list[list[str]]) -> None:
    """What the victim held in its hands is made again: one object, and only if it was embedded and not put."""
    wanted = set().union(*(texts_of(group) for group in names))
    if set(found.embeds) != wanted:
        found.problems.append(f"{len(set(found.embeds) ^ wanted)} texts were embedded that are none, or never")
    again = [group for group in names if texts_of(group) & found.twice]
    # While the rows of one segment are written, those of the next are being embedded.
    allowed = int(point in (AFTER_EMBEDDED, MID_WRITE) or (point == MID_EMBED and action == "freeze"))
    if len(again) > allowed or max(found.embeds.values()) > 2 or (point == AFTER_EMBEDDED and not again):
        found.problems.append(f"{len(again)} segments were embedded again, and it could be {allowed}")


def _judge_rows(site: Site, found: Verdict, victims: list[Worker], in_time: set[str], point: str) -> None:
    """Sealed is what the victim wrote only if it had sealed it; a zombie has dropped what it wrote in vain."""
    (seal,) = found.sealed.values()
    if seal.physical not in in_time:
        found.problems.append("what is sealed was not there when the others were told so")
    token = seal.physical.rpartition("-")[2]
    takeover = "takeover" in found.flags or "healed" in found.flags or "fenced_out" in found.flags
    if point not in SEALED_BY_THEN and not takeover:
        found.problems.append(f"nobody took over from {victims}: {token} is sealed, {found.flags}")
    if victims[0].job.strike.action == "freeze" and (left := set(physicals(site)) - {seal.physical}):
        found.problems.append(f"a zombie left {left}")
