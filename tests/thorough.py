"""Which tests are `thorough`: what a change must pass before it lands, but not after every edit.

`make test` leaves them out and `make test-all` adds them; together they are every test that is not marked `slow`. The
rules are in one place, so that one can read what `make test` covers: **every rule on every kind of store**. Variants
of a store (Redis 6.2, a cluster, SeaweedFS) and wrappers that change nothing keep the core of the contract there. Of
a cross product, only the same behaviour on one more store is left out.

A rule is a pattern for the id of a test. `test_the_rules_match` keeps each of them up to date.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FENCE_CORE = (
    "a_key_nobody_knows_is_new",
    "a_sealed_key_is_a_duplicate_with_the_receipt",
    "another_payload_is_a_conflict",
    "a_live_lease_is_in_flight",
    "an_expired_lease_is_taken_over",
    "a_stale_owner_cannot_seal_after_a_takeover",
    "an_older_sequence_is_stale",
    "a_released_key_is_free",
    "too_many_attempts_are_quarantined",
    "a_seal_never_creates_an_absent_record",
    "a_seal_repeated_by_its_token",
    "a_lease_of_an_older_epoch_can_neither",
    "a_shard_that_is_not_ready_answers_nothing",
    "fence_numbers_ascend",
    "a_batch_is_answered_as_if",
    "answers_stand_in_the_order",
    "every_answer_to_a_claim_leaves_one_row",
    "a_retraction_moves_the_head",
    "going_back_to_earlier_content",
)
"""parts of names in `FenceStoreContract`: what a variant of a store still shows in `make test`"""

OBJECT_CORE = (
    "a_second_put_loses_and_gets_the_bytes_of_the_first",
    "what_was_put_is_what_is_got",
    "an_absent_object_is_none",
    "a_listing_is_in_byte_order",
    "of_many_writers_one_wins",
    "a_deleted_name_can_be_put_again",
)
"""the same of `ObjectStoreContract`"""


class Rule(NamedTuple):
    reason: str
    pattern: str
    unless: tuple[str, ...] = ()
    """parts of the names of tests that stay in `make test`"""


RULES = (
    Rule("a variant of a store: the core of the contract is enough", r"test_fences\.py::TestCluster::", FENCE_CORE),
    Rule("a wrapper that changes nothing", r"test_fences\.py::TestFaultyWithoutFaults::", FENCE_CORE),
    Rule("a wrapper that changes nothing", r"test_instrumented_store\.py::Test\w+::", FENCE_CORE),
    Rule("a wrapper that changes nothing", r"test_objects\.py::TestFaultyWithoutFaults::", OBJECT_CORE),
    Rule("a variant of a store: the core of the contract is enough", r"test_objects\.py::TestSeaweedFS", OBJECT_CORE),
    Rule("the same on Redis 6.2", r"redis-?_?6\.?2", FENCE_CORE),
    Rule("the same on a cluster", r"\[(.*-)?(valkey_)?cluster"),
    Rule("the same on SeaweedFS", r"(?i)seaweed", OBJECT_CORE),
    Rule(
        "processes are killed, frozen or race; the machines and the crash points show the same in one process",
        r"""(?x)^tests/(
            crash/ | dagster/test_processes | drills/ | server/killed/ | engine/test_restore_drill
            | \w+/(attack/)?test_many_processes | (audit|outbox|queues)/test_\w+_killed | indexes/test_alias_races
            | documents/attack/test_(versions_race|kill_points) | documents/test_sinks_killed
            | indexes/attack/test_kill_points | server/test_(refunds|serve)\.py
        )""",
        ("crash/test_kill_points.py::test_one_receipt_whoever_stops_where[after_effect-kill-",),
    ),
    Rule(
        "the demo, Dagster's pages in a browser, and what Dagster loads", r"^tests/pipelines/test_(demo|ui|definitions)"
    ),
    Rule("notebooks are executed", r"^tests/notebooks/"),
    Rule("the site is built", r"^tests/site/test_build"),
    Rule("generated requests against the whole API", r"^tests/server/test_schema"),
    Rule("each in a process of its own", r"^tests/(package/test_extras|cli/test_process|benchmarks/)"),
    Rule("the command line on one more store", r"^tests/cli/.*\[(.*-)?valkey( alone)?[-\]]"),
    Rule(
        "documents on one more store: their heads, sequences and batches stay",
        r"^tests/documents/(test_(sync|compact|purge|verify|outages|ingest_table)|attack/test_(forgetting|unicode))\.py.*valkey",
    ),
    Rule(
        "random steps compared with a model: the state machine in memory stays",
        r"""(?x)^tests/(
            documents/test_\w+_model | documents/attack/test_state_machine | engine/test_expiry_sequences
            | server/test_sequences
        )\.py""",
    ),
    Rule("programs of the documentation", r"test_a_snippet|^tests/(client|documents/attack|telemetry)/test_docs\.py"),
    Rule("the state machines on real servers", r"^tests/machine/test_machine\.py::test_on_(sqlite|redis)"),
)


def reason_for(test: str) -> str | None:
    """Returns why the test with this id is thorough, or None if `make test` runs it."""
    for rule in RULES:
        if re.search(rule.pattern, test) and not any(name in test for name in rule.unless):
            return rule.reason
    return None
