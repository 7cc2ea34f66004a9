"""The policy: the documented file as it is, right defaults, and every refusal with its reason."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError as PydanticValidationError

from ragfence.core.decision_rows import Row
from ragfence.core.layout import NO_TOKEN, RowKind
from ragfence.core.policy import ROW_FIELDS, KindRules, Policy
from ragfence.core.retention import SHORTEST_HOURS, WEBHOOK_HORIZONS_HOURS
from ragfence.core.settings import load_policy
from ragfence.errors import PolicyError

DOCUMENTED = """
# opsdeploy/idempotency.yml
require_headers:
  - Idempotency-Key
reject_on_body_mismatch: true
stores:
  fence: redis
  ttl:
    webhook_days: 14
    api_hours: 48
    batch_days: 3
logging:
  include_fields:
    - idempotency_key
    - effect_id
    - decision   # new, duplicate, conflict
    - source_type
    - source_id
on_conflict:
  status: 409
  include_diff: true
"""

DAY_MS = 24 * 3600 * 1000


def _problems(given: Any) -> tuple[str, ...]:
    with pytest.raises(PolicyError) as refused:
        Policy.from_mapping(given)
    problems: tuple[str, ...] = refused.value.details["problems"]
    assert all(problem in refused.value.message for problem in problems)
    return problems


def _problem(given: Any) -> str:
    (problem,) = _problems(given)
    return problem


def test_the_documented_file_loads_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "idempotency.yml"
    file.write_text(DOCUMENTED)
    policy = load_policy(file)
    assert policy.require_headers == ("Idempotency-Key",)
    assert policy.reject_on_body_mismatch
    assert policy.stores.fence == "redis"
    assert policy.for_kind("webhook").ttl_ms == 14 * DAY_MS
    assert policy.for_kind("ticket").ttl_ms == 2 * DAY_MS
    assert policy.for_kind("document").ttl_ms == 3 * DAY_MS
    assert policy.logging.include_fields == (
        "idempotency_key",
        "effect_id",
        "decision",
        "source_type",
        "source_id",
    )
    assert policy.on_conflict.status == 409
    assert policy.on_conflict.include_diff
    # Nothing but the store, the fields of the log and the diff differs from what holds without a file.
    other: Any = {"stores": {"fence"}, "logging": {"include_fields"}, "on_conflict": {"include_diff"}}
    assert policy.model_dump(exclude=other) == Policy().model_dump(exclude=other)


def test_the_defaults_are_right() -> None:
    policy = Policy()
    assert policy.for_kind("ticket") == KindRules(
        retention_class="api",
        ttl_ms=2 * DAY_MS,
        pending_ttl_ms=7 * DAY_MS,
        lease_ms=30_000,
        max_attempts=5,
        max_runtime_ms=3_600_000,
        wait_ms=60_000,
    )
    assert policy.on_store_error == "closed"
    assert policy.content_hash == "xxh3"
    assert (policy.results.inline_max_bytes, policy.results.max_bytes) == (256 * 1024, 64 * 1024 * 1024)
    assert not policy.on_conflict.include_diff
    assert policy.redactor.redact({"token": "x"}) == {"token": "[redacted]"}
    assert (policy.indexes.keep_targets, policy.indexes.max_shrinkage, policy.indexes.min_self_recall) == (3, 0.2, 0.99)


@pytest.mark.parametrize(
    ("kind", "retention"),
    [
        ("webhook", "webhook"),
        ("webhook.stripe", "webhook"),
        ("document", "batch"),
        ("index", "batch"),
        ("documents", "api"),
        ("ticket", "api"),
    ],
)
def test_a_kind_without_an_entry_has_the_class_of_its_name(kind: str, retention: str) -> None:
    assert Policy().for_kind(kind).retention_class == retention


def test_a_kind_has_its_own_rules_where_it_names_them() -> None:
    own = {
        "class": "webhook",
        "lease_ttl_s": 1.5,
        "max_attempts": 2,
        "max_runtime_s": 60,
        "wait_s": 0,
        "ttl_hours": 200,
    }
    policy = Policy.from_mapping({"kinds": {"payment": own, "refund": {"class": "batch"}}})
    assert policy.for_kind("payment") == KindRules("webhook", 200 * 3_600_000, 7 * DAY_MS, 1500, 2, 60_000, 0)
    assert policy.for_kind("refund") == KindRules("batch", 3 * DAY_MS, 7 * DAY_MS, 30_000, 5, 3_600_000, 60_000)
    assert policy.for_kind("payment") is policy.for_kind("payment")


def test_waiting_can_be_turned_off_for_all_but_one_kind() -> None:
    policy = Policy.from_mapping({"wait": {"mode": "raise"}, "kinds": {"index": {"wait_s": 600}}})
    assert policy.for_kind("ticket").wait_ms == 0
    assert policy.for_kind("index").wait_ms == 600_000


def test_kinds_made_up_by_callers_do_not_pile_up() -> None:
    policy = Policy()
    for number in range(3000):
        policy.for_kind(f"kind-{number}")
    assert len(policy._rules) <= 1024


def test_a_mismatch_can_never_be_applied() -> None:
    problem = _problem({"reject_on_body_mismatch": False})
    assert problem.startswith("reject_on_body_mismatch: ")
    assert "never applied" in problem


@pytest.mark.parametrize(
    ("ttl", "problem"),
    [
        ({"webhook_days": 6.9}, "stores.ttl.webhook_days: 6.9 is below .*; at least 7$"),
        ({"api_hours": 23}, "stores.ttl.api_hours: 23 is below .*; at least 24$"),
        ({"batch_days": 0.5}, "stores.ttl.batch_days: 0.5 is below .*; at least 1$"),
    ],
)
def test_a_ttl_below_the_retry_horizon_of_its_class_is_refused(ttl: dict[str, float], problem: str) -> None:
    with pytest.raises(PolicyError, match=problem.removesuffix("$")):
        Policy.from_mapping({"stores": {"ttl": ttl}})


def test_the_shortest_ttls_are_accepted() -> None:
    policy = Policy.from_mapping({"stores": {"ttl": {"webhook_days": 7, "api_hours": 24, "batch_days": 1}}})
    assert policy.for_kind("webhook").ttl_ms == 7 * DAY_MS


def test_a_sender_needs_twice_its_retry_horizon() -> None:
    acme: dict[str, dict[str, Any]] = {"acme": {"class": "webhook", "retry_horizon_hours": 180}}
    assert _problem({"providers": acme}) == (
        "stores.ttl.webhook_days: 14 is below twice the 180 hours for which acme retries; at least 15"
    )
    longer = Policy.from_mapping({"providers": acme, "stores": {"ttl": {"webhook_days": 15}}})
    assert longer.for_kind("webhook").ttl_ms == 15 * DAY_MS
    acme["acme"]["retry_horizon_hours"] = 168
    assert Policy.from_mapping({"providers": acme}).providers["acme"].retention == "webhook"
    acme["acme"]["retry_horizon_hours"] = 100  # below the shortest TTL of the class, twice as much is not
    assert _problem({"providers": acme, "stores": {"ttl": {"webhook_days": 8}}}).endswith("at least 8.33333")
    batch = {"nightly": {"class": "batch", "retry_horizon_hours": 48}}
    assert _problem({"providers": batch}).startswith("stores.ttl.batch_days: 3 is below twice the 48 hours")


def test_the_ttl_of_a_kind_is_held_to_the_same() -> None:
    assert _problem({"kinds": {"webhook.x": {"ttl_hours": 48}}}).startswith("kinds.webhook.x.ttl_hours: 48 is below")
    given = {"kinds": {"job": {"class": "batch", "ttl_hours": 80}}, "stores": {"ttl": {"batch_days": 5}}}
    assert Policy.from_mapping(given).for_kind("job").ttl_ms == 80 * 3_600_000
    given["providers"] = {"nightly": {"class": "batch", "retry_horizon_hours": 48}}
    assert _problem(given) == (
        "kinds.job.ttl_hours: 80 is below twice the 48 hours for which nightly retries; at least 96"
    )


def test_known_senders_are_covered_by_the_shortest_webhook_ttl() -> None:
    assert {"stripe", "paypal", "slack"} <= set(WEBHOOK_HORIZONS_HOURS)
    assert 2 * max(WEBHOOK_HORIZONS_HOURS.values()) <= SHORTEST_HOURS["webhook"]


def test_a_file_may_correct_a_known_sender() -> None:
    assert _problem({"providers": {"Stripe": {"retry_horizon_hours": 400}}}) == (
        "stores.ttl.webhook_days: 14 is below twice the 400 hours for which stripe retries; at least 33.3333"
    )


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lease": {"ttl_s": 0.01}}, "lease.ttl_s: must be greater than or equal to 0.05, got 0.01"),
        ({"lease": {"ttl_s": "30"}}, "lease.ttl_s: must be a valid number, got '30'"),
        ({"lease": {"ttl_s": float("inf")}}, "lease.ttl_s: must be a finite number, got inf"),
        ({"lease": {"max_attempts": True}}, "lease.max_attempts: must be a valid integer, got True"),
        ({"lease": {"max_attempts": 0}}, "lease.max_attempts: must be greater than or equal to 1, got 0"),
        ({"lease": 5}, "lease: must be a mapping, got 5"),
        ({"kinds": {"a": None}}, "kinds.a: must be a mapping, got None"),
        ({"leases": {}}, "leases: no such setting; did you mean 'lease'?"),
        ({"zzz": 1}, "zzz: no such setting"),
        ({3: 4}, "3: no such setting"),
        ({"on_conflict": {"status": 500}}, "on_conflict.status: must be 409 or 422, got 500"),
        ({"on_conflict": {"include_diff": "no"}}, "on_conflict.include_diff: must be a valid boolean, got 'no'"),
        ({"on_store_error": "ignore"}, "on_store_error: must be 'closed' or 'open', got 'ignore'"),
        ({"content_hash": "md5"}, "content_hash: must be 'xxh3', 'sha256' or 'hmac', got 'md5'"),
        (
            {"content_hash": "hmac", "content_secret": "hunter2"},
            "content_secret: must name where the secret is: content_secret: {env: NAME} or {file: PATH}",
        ),
        (
            {"content_hash": "hmac", "content_secret": {"env": 7}},
            "content_secret.env: must name where the secret is: content_secret: {env: NAME} or {file: PATH}",
        ),
        (
            {"content_hash": "hmac", "content_secret": {"env": "A", "file": "b"}},
            "content_secret: names a file and an environment variable; keep one of them",
        ),
        (
            {"content_secret": {"env": "A"}},
            "content_secret: is for content_hash: hmac, and this policy has xxh3",
        ),
        ({"stores": {"fence": "memcached"}}, "stores.fence: must be 'sqlite' or 'redis', got 'memcached'"),
        ({"wait": {"mode": "poll"}}, "wait.mode: must be 'wait' or 'raise', got 'poll'"),
        ({"require_headers": "Idempotency-Key"}, "require_headers: must be a list, got 'Idempotency-Key'"),
        ({"require_headers": ["a b"]}, "require_headers: 'a b' is not the name of an HTTP header"),
        ({"providers": {"acme": {}}}, "providers.acme.retry_horizon_hours: is missing"),
        (
            {"kinds": {"a": {"class": "cron"}}},
            "kinds.a.class: must be 'webhook', 'api', 'batch', 'queue', 'outbox' or 'step', got 'cron'",
        ),
        (
            {"logging": {"include_fields": ["effect_ids"]}},
            "logging.include_fields: 'effect_ids' is not a field of a decision row; did you mean 'effect_id'?",
        ),
        (
            {"lease": {"ttl_s": 10, "max_runtime_s": 5}},
            "lease: a lease of 10 s is longer than max_runtime_s (5), after which nothing is renewed",
        ),
        (
            {"kinds": {"a": {"max_runtime_s": 8 * 24 * 3600}}},
            "stores.ttl.pending_days: 7 would forget an operation while it runs; kinds.a allows 691200 s",
        ),
        ({"indexes": {"keep_targets": 0}}, "indexes.keep_targets: must be greater than or equal to 1, got 0"),
        ({"indexes": {"max_shrinkage": 1.5}}, "indexes.max_shrinkage: must be less than or equal to 1, got 1.5"),
        ({"indexes": {"min_overlaps": 0.5}}, "indexes.min_overlaps: no such setting; did you mean 'min_overlap'?"),
        (
            {"results": {"inline_max_bytes": 2048, "max_bytes": 1024}},
            "results.inline_max_bytes: must not be above max_bytes (1024)",
        ),
    ],
)
def test_each_mistake_is_one_line_with_its_path(given: Any, problem: str) -> None:
    assert _problem(given) == problem


def test_redaction_rules_are_checked_with_the_policy() -> None:
    fields, patterns = _problems({"redaction": {"fields": ["a..b"], "patterns": ["emial"]}})
    assert fields.startswith("redaction.fields: 'a..b' is not a field to redact")
    assert patterns.startswith("redaction.patterns: 'emial' is not a redaction pattern")
    policy = Policy.from_mapping({"redaction": {"fields": ["$.user.name"], "patterns": ["email"]}})
    assert policy.redactor.redact({"user": {"name": "x"}, "m": "a@b.org", "token": 1}) == {
        "user": {"name": "[redacted]"},
        "m": "[redacted]",
        "token": "[redacted]",
    }


def test_all_problems_are_told_at_once() -> None:
    assert len(_problems({"lease": {"ttl_s": 0, "max_attempts": 0}, "wait": {"mode": "x"}, "nope": 1})) == 4
    assert len(_problems({"stores": {"ttl": {"webhook_days": 1, "api_hours": 1, "batch_days": 0.1}}})) == 3


def test_building_a_policy_in_code_is_held_to_the_same() -> None:
    with pytest.raises(PolicyError, match=r"lease\.ttl_s"):
        Policy(lease={"ttl_s": 0})
    with pytest.raises(PolicyError, match="webhook_days"):
        Policy(stores={"ttl": {"webhook_days": 1}})


def test_a_policy_is_frozen_and_crosses_process_boundaries() -> None:
    policy = Policy.from_mapping({"lease": {"ttl_s": 5}})
    policy.for_kind("ticket")
    assert policy.redactor is policy.redactor
    with pytest.raises(PydanticValidationError):
        policy.lease.ttl_s = 6
    again = pickle.loads(pickle.dumps(policy))  # noqa: S301
    assert again == policy == Policy.from_mapping({"lease": {"ttl_s": 5}})
    assert again.for_kind("ticket") == policy.for_kind("ticket")


def test_every_column_of_a_decision_row_can_be_logged() -> None:
    row = Row(token=NO_TOKEN, position=0, ts_ms=1, kind=RowKind.NEW, key=bytes(33), fingerprint=bytes(16))
    assert set(row.columns()) <= ROW_FIELDS
    assert "tenant" in ROW_FIELDS


def test_confirmations_can_be_asked_for():
    assert not Policy().durability.confirms
    assert Policy.from_mapping({"durability": {"wait_replicas": 1}}).durability.confirms
    assert Policy.from_mapping({"durability": {"wait_aof": True}}).durability.confirms
