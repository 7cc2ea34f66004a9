"""`ragfence keys` and `ragfence status`: what the store holds."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from ragfence import Fence, Operation
from ragfence.cli.key_lookup import scan_keys
from tests.cli.conftest import Site, fail_until_quarantined, key_of, perform
from tests.engine.worlds import Wrapped, abandon, eventually


def listed(site: Site, *filters: str) -> list[dict[str, Any]]:
    done = site.run("keys", *filters, "--json")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def full(site: Site) -> Site:
    """A sealed one, a failed one, a quarantined one, and two that are held, one of them of an ordered source."""
    fence = site.open(lease={"max_attempts": 2})
    perform(fence, "done")
    failing = fence.once(kind="mail", key=lambda to: to, terminal=ValueError)(_refuse)
    with pytest.raises(ValueError, match="no such"):
        failing("nobody@example.org")
    fail_until_quarantined(fence, "stuck")
    abandon(fence, Operation(kind="ticket", source_id="held"))
    abandon(fence, Operation(kind="webhook", source_id="ordered", sequence=4))
    return site


def _refuse(to: str) -> None:
    raise ValueError(f"no such address: {to}")


def test_every_record_is_listed_once_with_what_is_known_of_it(full: Site) -> None:
    found = {one["source_id"]: one for one in listed(full)}
    assert {name: (one["kind"], one["state"], one["attempt"]) for name, one in found.items()} == {
        "done": ("ticket", "sealed", 1),
        "nobody@example.org": ("mail", "failed", 1),
        "stuck": ("ticket", "quarantined", 2),
        "held": ("ticket", "held", 1),
        "ordered": ("webhook", "held", 1),
    }
    assert found["stuck"]["error_code"] == "RuntimeError"
    assert found["held"]["owner"] == "worker-7"
    assert 0 < found["held"]["lease_left_ms"] <= 30_000
    assert found["done"]["lease_left_ms"] is None
    assert 47 * 3_600_000 < found["done"]["ttl_left_ms"] <= 48 * 3_600_000
    assert found["done"]["key"] == key_of(full.opened[0], "done")
    assert all(one["age_ms"] >= 0 for one in found.values())
    assert [one["first_seen"] for one in listed(full)] == sorted(one["first_seen"] for one in found.values())


@pytest.mark.parametrize(
    ("filters", "sources"),
    [
        (["--kind", "ticket"], {"done", "stuck", "held"}),
        (["--kind", "webhook"], {"ordered"}),
        (["--state", "held"], {"held", "ordered"}),
        (["--state", "quarantined"], {"stuck"}),
        (["--state", "released"], set()),
        (["--state", "failed"], {"nobody@example.org"}),
        (["--kind", "ticket", "--state", "sealed"], {"done"}),
        (["--source-id", "held"], {"held"}),
        (["--source-id", "ordered"], {"ordered"}),
        (["--source-id", "ordered", "--state", "sealed"], set()),
        (["--source-id", "nobody"], set()),
        (["--older-than", "1h"], set()),
        (["--younger-than", "1h"], {"done", "nobody@example.org", "stuck", "held", "ordered"}),
        (["--younger-than", "1h", "--older-than", "1h"], set()),
        (["--younger-than", "2020-01-01T00:00", "--kind", "mail"], {"nobody@example.org"}),
    ],
)
def test_records_are_filtered(full: Site, filters: list[str], sources: set[str]) -> None:
    assert {one["source_id"] for one in listed(full, *filters)} == sources


def test_records_are_filtered_by_the_beginning_of_their_key(full: Site) -> None:
    for source, kind, more in (("done", "ticket", {}), ("ordered", "webhook", {"sequence": 4})):
        key = key_of(full.opened[0], source, kind=kind, **more)
        assert [one["key"] for one in listed(full, "--prefix", key[:10].upper())] == [key]
        assert key in {one["key"] for one in listed(full, "--prefix", key[:2])}


def a_millisecond_later(fence: Fence) -> None:
    before = fence.inspector.fences.now_ms()
    eventually(lambda: fence.inspector.fences.now_ms() > before)


def test_a_limit_shows_the_oldest_and_says_that_there_are_more(site: Site) -> None:
    fence = site.open()
    for number in range(5):
        perform(fence, f"s{number}")
        a_millisecond_later(fence)
    assert [one["source_id"] for one in listed(site, "--limit", "2")] == ["s0", "s1"]
    assert len(listed(site, "--limit", "0")) == 5
    assert "the oldest 2 of 5; show all with --limit 0" in site.run("keys", "--limit", "2").stdout
    assert "of 5" not in site.run("keys").stdout


def test_a_table_for_a_pipe_has_whole_keys_and_one_line_each(full: Site) -> None:
    lines = full.run("keys").stdout.splitlines()
    assert lines[0].split()[:3] == ["key", "kind", "source_id"]
    assert len(lines) == 6
    for one in listed(full):
        assert any(line.startswith(one["key"]) and one["source_id"] in line for line in lines)


def test_a_lease_that_ran_out_is_called_lapsed(site: Site) -> None:
    abandon(site.open(lease={"ttl_s": 0.05}), Operation(kind="ticket", source_id="a"))
    eventually(lambda: "lapsed" in site.run("keys").stdout)
    (one,) = listed(site)
    assert (one["state"], one["lease_left_ms"]) == ("held", 0)


def test_a_key_that_the_server_shows_twice_is_listed_once(site: Site) -> None:
    class Rehashing(Wrapped):
        def scan(self, shard: int | None = None) -> Any:
            found = list(self.inner.scan(shard))
            return [*found, *found]

    fence = site.open()
    perform(fence, "a")
    perform(fence, "b")
    assert len({found.key for found in scan_keys(Rehashing(fence.inspector.fences))}) == 2
    assert len(list(scan_keys(Rehashing(fence.inspector.fences)))) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["--state", "lost"],
        ["--older-than", "yesterday"],
        ["--prefix", "xyz"],
        ["--prefix", "a"],
        ["--limit", "-1"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_ends_with_2(embedded: Site, wrong: list[str]) -> None:
    embedded.open()
    done = embedded.run("keys", *wrong)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage:" in done.stderr


def test_the_status_counts_what_is_held_and_what_was_saved(full: Site) -> None:
    fence = full.opened[0]
    for _ in range(3):
        perform(fence, "done")
    told = full.json("status")
    assert {(one["kind"], one["state"]): one["count"] for one in told["records"]} == {
        ("ticket", "sealed"): 1,
        ("ticket", "quarantined"): 1,
        ("ticket", "held"): 1,
        ("mail", "failed"): 1,
        ("webhook", "held"): 1,
    }
    assert (told["tenant"], told["quarantined"], told["pending"]["count"]) == (fence.tenant, 1, 2)
    assert told["pending"]["oldest"]["key"] == key_of(fence, "held")
    assert told["pending"]["oldest"]["age_ms"] >= 0
    assert told["decisions"] == {"since": "24h", "new": 2, "duplicates": 3, "hit_rate": 0.6, "counted_since": None}
    assert told["rows"] == len(list(fence.audit.rows()))
    assert told["bytes"] > 1000
    assert told["store"] == fence.inspector.fences.url
    assert told["shards"]["total"] == 64
    if full.name == "valkey alone":
        assert told["objects"] is None
        assert 0 < told["shards"]["ready"] < 64
    else:
        assert told["objects"].startswith("file://")
        assert (told["shards"]["ready"], told["epoch"]) == (64, 1)
    text = full.run("status").stdout
    for part in ("3 of 5 operations in 24h (60.0%)", "quarantined     1", key_of(fence, "held"), told["store"]):
        assert part in text


def test_the_hit_rate_is_that_of_the_time_asked_for(embedded: Site) -> None:
    fence = embedded.open()
    perform(fence, "a")
    told = embedded.json("status", "--since", "2030-01-01T00:00:00")
    assert told["decisions"] == {
        "since": "2030-01-01T00:00:00",
        "new": 0,
        "duplicates": 0,
        "hit_rate": None,
        "counted_since": None,
    }
    assert told["rows"] == 2
    assert "0 operations in" in embedded.run("status", "--since", "2030-01-01T00:00:00").stdout
    assert embedded.json("status", "--since", "1ms")["decisions"]["new"] == 1  # of the hour


def test_the_status_does_not_hydrate_and_tells_what_waits(embedded: Site) -> None:
    fence = embedded.open()
    perform(fence, "a")
    fence.inspector.fences.forget_markers(2**60)
    told = embedded.json("status")
    assert told["shards"] == {"total": 64, "ready": 0, "hydrating": 0}
    assert fence.inspector.fences.begin_epoch(7)
    told = embedded.json("status")
    assert (told["epoch"], told["shards"]) == (7, {"total": 64, "ready": 0, "hydrating": 64})
    assert "64 being hydrated" in embedded.run("status").stdout


def test_expired_records_that_wait_to_be_purged_are_counted(embedded: Site) -> None:
    fence = embedded.open()
    perform(fence, "a")
    perform(fence, "b")
    assert embedded.json("status")["expired"] == 0
    with closing(sqlite3.connect(".ragfence/fences.db")) as db, db:
        db.execute("UPDATE records SET expires_ms = 1 WHERE key = ?", (bytes.fromhex(key_of(fence, "a")),))
    told = embedded.json("status")
    assert told["expired"] == 1
    assert [(one["count"], one["estimated"]) for one in told["records"]] == [(2, True)]


def test_a_password_is_never_shown(request: pytest.FixtureRequest, embedded: Site) -> None:
    server = request.getfixturevalue("valkey_server")
    url = server.url.replace("redis://", "redis://default:geheim@")
    done = embedded.run("status", "--store", url)
    assert "geheim" not in done.output
    assert f"{server.host}:{server.port}" in done.output
