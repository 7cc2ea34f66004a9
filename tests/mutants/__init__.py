"""Deliberately broken variants of ragfence: the suite must catch every one.

Each mutant changes one rule in a copy of the package and runs the tests that should notice. A mutant that survives is
a rule that no test holds. The entries are in one module per package of ragfence (`surfaces` for several small ones);
those of locks, which go through several, are in `locks`, and those that only a killed process shows in `events`.
`python -m tests.mutants [word ...]` runs those whose name contains one of the words.
"""

from tests.mutants import (
    core,
    documents,
    engine,
    events,
    indexes,
    locks,
    outbox,
    queues,
    redis,
    server,
    stores,
    surfaces,
    webhooks,
)

MUTANTS = [
    *core.MUTANTS,
    *stores.MUTANTS,
    *redis.MUTANTS,
    *engine.MUTANTS,
    *documents.MUTANTS,
    *indexes.MUTANTS,
    *locks.MUTANTS,
    *events.MUTANTS,
    *queues.MUTANTS,
    *outbox.MUTANTS,
    *webhooks.MUTANTS,
    *server.MUTANTS,
    *surfaces.MUTANTS,
]
