"""Builders against who edits, purges and searches at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tests.chaos.sites import Site
from tests.chaos.work import Strike
from tests.indexes.attack.corpus import PARAGRAPHS, groups, prepared
from tests.indexes.attack.crew import IndexCrew
from tests.indexes.attack.judge import ALIAS, Verdict, files_with, judge, opened, snippets_with_vectors
from tests.indexes.attack.work import build, ingest, publish, purge, search, tell

NAMES = groups(4, 3)
SECRET = NAMES[0][1]
MARK = f"{SECRET}2"
"""a word of its text alone"""
CONTENDED, BUILDERS = groups(4, 6), 3
IN_HAND = BUILDERS * len(CONTENDED[0]) * PARAGRAPHS
"""texts: a segment for each builder. If nothing were copied when the log is rewritten, each of the eight purges would
make a whole segment be embedded again, which is nearly three times as many."""


def purged_meanwhile(site: Site, crew: IndexCrew, seed: int) -> Verdict:
    """A document is purged while three build."""
    prepared(site, NAMES)
    ids = _ids_of(site, SECRET)
    builder = [build(2, pause_s=0.3, seed=seed), ingest([f"{seed}-new"]), build(2, pause_s=0.1, seed=seed + 1)]
    crew.run(builder, builder, [build(3, pause_s=0.2, seed=seed, metric="l2")], [purge(SECRET, pause_s=0.6, seed=seed)])
    return _judge_purge(site, crew, ids)


def purged_again_and_again(site: Site, crew: IndexCrew, *, builds: int = 4) -> Verdict:
    """Three build and add documents while two purge one document after the other; then all is built once more."""
    names = CONTENDED
    prepared(site, names)
    doomed = [group[at] for at in (1, 4) for group in names]
    ids = set[str]().union(*(_ids_of(site, name) for name in doomed))
    builders = [
        list(chain.from_iterable([ingest([f"new-{who}-{at}"]), build(pause_s=0.2, seed=at)] for at in range(builds)))
        for who in range(BUILDERS)
    ]
    purgers = [[purge(name, pause_s=0.4, seed=at) for at, name in enumerate(doomed[who::2])] for who in range(2)]
    crew.run(*builders, *purgers, patience_s=140.0)
    crew.run([build()])
    return _judge_purge(site, crew, ids, doomed)


def purged_at(site: Site, crew: IndexCrew, action: str, point: str) -> Verdict:
    """A builder stops at the point, the document is purged, and the builder goes on if it can: its lease is its own."""
    prepared(site, NAMES[:1])  # one segment, so that it is this one that the builder has in its hands
    ids = _ids_of(site, SECRET)
    victims = crew.start([build()], strike=Strike(action, point), embed_workers=1)
    crew.crew.wait_struck(*victims)
    crew.run([purge(SECRET)])
    crew.wake(victims)
    return _judge_purge(site, crew, ids)


def _ids_of(site: Site, name: str) -> set[str]:
    with opened(site) as fence:
        return {snippet.snippet_id for snippet in fence.documents.snippets(name)}


def _judge_purge(site: Site, crew: IndexCrew, ids: set[str], names: Sequence[str] = (SECRET,)) -> Verdict:
    """They are in no index, in no object of vectors, and in no file."""
    found = judge(site, crew, purged=names)
    with opened(site) as fence:
        backend = fence.indexes.backend("lance")
        for physical in filter(backend.exists, backend.physicals()):
            held = {each for table in backend.read(physical, ["doc_id"]) for each in table.column("doc_id").to_pylist()}
            found.problems += [f"{physical} has {name}" for name in sorted(held.intersection(names))]
    for name in names:
        found.problems += [f"{file} has the text of {name}" for file in files_with(site.folder / "objects", f"{name}2")]
    if ids & snippets_with_vectors(site):
        found.problems.append(f"there are vectors of {', '.join(names)}")
    return found


def ingested_meanwhile(site: Site, crew: IndexCrew, *, edits: int, builds: int) -> Verdict:
    """Documents are edited and added all the time: every sealed build is the snapshot that its hash names."""
    names = groups(3, 3)
    prepared(site, names)
    flat = list(chain.from_iterable(names))
    steps = [ingest([flat[at % len(flat)], f"new-{at:04d}"], edition=at + 1) for at in range(edits)]
    crew.run(steps, *[[build(builds, pause_s=0.05, seed=seed)] for seed in range(3)])
    return judge(site, crew)


def searched_meanwhile(site: Site, crew: IndexCrew, *, searches: int, swaps: int, rounds: int = 1) -> Verdict:
    """Documents are edited, built and swapped while two others search: each answer is of one sealed build."""
    names = groups(3, 4)
    prepared(site, names)
    crew.run([publish(ALIAS)])
    flat, threads = list(chain.from_iterable(names)), 2
    times = -(-searches // (2 * threads * rounds))
    for turn in range(rounds):
        over = site.folder / f"over-{turn:03d}"
        editions = range(1 + turn * swaps, 1 + (turn + 1) * swaps)
        edits = [[ingest([flat[each % len(flat)]], edition=each), publish(ALIAS)] for each in editions]
        reader = [search(ALIAS, flat, times=times, threads=threads, until=over)]
        crew.run([*chain.from_iterable(edits), tell(over)], reader, reader, patience_s=140.0)
    found = judge(site, crew)
    if found.searches < searches:
        found.problems.append(f"{found.searches} searches, and it should be {searches}")
    return found
