"""`ragfence explain`: by key, by the beginning of a key, by source."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing

import pytest

import ragfence
from ragfence import Operation
from tests.cli.conftest import Site, fail_until_quarantined, key_of, perform
from tests.engine.worlds import abandon, eventually


def whats(told: dict) -> list[str]:
    return [event["what"] for event in told["events"]]


def test_a_key_its_beginning_and_its_source_tell_the_same_story(site: Site) -> None:
    fence = site.open()
    key = perform(fence, "doc-1")
    perform(fence, "doc-1")
    perform(fence, "other")
    (told,) = site.json("explain", key)["keys"]
    assert (told["key"], whats(told)) == (key, ["claimed", "sealed", "replayed"])
    assert told["operation"] == {"kind": "ticket", "source_id": "doc-1"}
    for name in (key[:12], key[:12].upper(), "doc-1"):
        (again,) = site.json("explain", name)["keys"]
        assert (again["key"], again["events"], again["commit"]) == (key, told["events"], told["commit"])


def test_the_present_state_and_the_commit_are_told(site: Site) -> None:
    fence = site.open()
    with fence.claim(Operation(kind="ticket", source_id="a"), payload=1) as op:
        op.seal(effect_id="eff-1", result={"text": "x" * 100})
    (told,) = site.json("explain", op.receipt.key)["keys"]
    now = told["now"]
    assert (now["state"], now["attempt"], now["effect_id"], now["result_bytes"]) == ("sealed", 1, "eff-1", 111)
    assert 47 * 3_600_000 < now["ttl_left_ms"] <= 48 * 3_600_000
    assert now["lease_left_ms"] is None
    if site.name == "valkey alone":
        assert told["commit"] is None
    else:
        assert (told["commit"]["effect_id"], told["commit"]["failed"]) == ("eff-1", False)


def test_a_large_result_has_its_size_although_it_is_an_object(embedded: Site) -> None:
    fence = embedded.open(results={"inline_max_bytes": 10})
    with fence.claim(Operation(kind="ticket", source_id="a")) as op:
        op.seal(result="x" * 1000)
    (told,) = embedded.json("explain", "a")["keys"]
    assert told["now"]["result_bytes"] == 1002


def test_a_live_lease_a_lapsed_one_and_a_quarantine(site: Site) -> None:
    fence = site.open(lease={"max_attempts": 2})
    held = abandon(fence, Operation(kind="ticket", source_id="held"))
    stuck = fail_until_quarantined(fence, "stuck")
    (told,) = site.json("explain", "held")["keys"]
    assert (told["now"]["state"], told["now"]["owner"]) == ("held", "worker-7")
    assert 0 < told["now"]["lease_left_ms"] <= 30_000
    assert told["now"]["ttl_left_ms"] > 6 * 86_400_000
    (told,) = site.json("explain", stuck)["keys"]
    assert (told["now"]["state"], told["now"]["attempt"], told["now"]["error_code"]) == (
        "quarantined",
        2,
        "RuntimeError",
    )
    assert whats(told) == ["claimed", "released", "claimed", "released", "quarantined"]
    text = site.run("explain", "stuck").stdout
    assert "quarantined after 2 attempts, last error RuntimeError" in text
    held.lease.discard()
    short = site.open(lease={"ttl_s": 0.05})
    abandon(short, Operation(kind="ticket", source_id="brief"))
    eventually(lambda: "lease expired" in site.run("explain", "brief").stdout)


def test_all_keys_of_a_source_are_told_and_an_ordered_one_too(site: Site) -> None:
    fence = site.open()
    perform(fence, "s", sequence=3)
    with pytest.raises(ragfence.errors.Stale):
        perform(fence, "s", sequence=2)
    abandon(fence, Operation(kind="ticket", source_id="s", sequence=9))
    told = site.json("explain", "s")["keys"]
    by_sequence = {one["operation"]["sequence"]: one for one in told}
    assert sorted(by_sequence) == ["2", "3", "9"]
    assert whats(by_sequence["2"]) == ["stale"]
    assert by_sequence["2"]["now"] is None
    assert by_sequence["3"]["now"]["state"] == "sealed"
    assert (by_sequence["9"]["now"]["state"], by_sequence["9"]["now"]["owner"]) == ("held", "worker-7")


def test_replays_are_collapsed_unless_all_are_wanted(site: Site) -> None:
    fence = site.open()
    for _ in range(15):
        perform(fence, "a")
    assert "14 times, last " in site.run("explain", "a").stdout
    (told,) = site.json("explain", "a")["keys"]
    assert told["events"][-1]["count"] == 14
    (each,) = site.json("explain", "a", "--all")["keys"]
    assert whats(each).count("replayed") == 14


def test_a_source_that_looks_like_a_key_is_taken_for_what_it_is(site: Site) -> None:
    fence = site.open()
    key = perform(fence, "a")
    perform(fence, key[:10])
    assert [one["operation"]["source_id"] for one in site.json("explain", key[:10])["keys"]] == [key[:10]]
    assert [one["operation"]["source_id"] for one in site.json("explain", key[:11])["keys"]] == ["a"]


def test_an_unclear_beginning_is_refused_with_the_keys_it_may_mean(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragfence.cli.key_lookup.LEAST_DIGITS", 2)
    monkeypatch.setattr("ragfence.cli.key_lookup._HEX", re.compile("[0-9a-f]{2,66}"))
    fence = site.open()
    keys = [perform(fence, "a", revision=str(number)) for number in range(3)]  # one source, so one shard
    done = site.run("explain", keys[0][:2])
    assert (done.exit_code, done.stdout) == (1, "")
    assert all(key in done.stderr for key in keys)
    assert "-> give more of its digits" in done.stderr


def test_records_without_rows_are_found_by_their_key(embedded: Site) -> None:
    key = perform(embedded.open(), "a")
    with closing(sqlite3.connect(".ragfence/fences.db")) as db, db:
        db.execute("DELETE FROM decision_rows")
    for name in (key, key[:10]):
        (told,) = embedded.json("explain", name)["keys"]
        assert (told["events"], told["now"]["state"], told["key"]) == ([], "sealed", key)
    assert "no decision rows (they may have expired)" in embedded.run("explain", key).stdout


@pytest.mark.parametrize("what", ["nobody", "ff" * 33, "00" * 33, "00000000", "abc"])
def test_what_nobody_knows_is_an_error(site: Site, what: str) -> None:
    perform(site.open(), "a")
    done = site.run("explain", what)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "\n  -> " in done.stderr
    assert site.json("explain", what, code=1)["error"]["code"] == "VALIDATION"


def test_text_of_callers_cannot_steer_the_terminal(embedded: Site) -> None:
    fence = ragfence.open(owner="[bold]evil\x1b[31m")
    embedded.opened.append(fence)
    perform(fence, "[red]a[/red]", revision="[/]")
    for command in (["explain", "[red]a[/red]"], ["keys"], ["decisions"], ["status"]):
        done = embedded.run(*command)
        assert done.exit_code == 0
        assert "\x1b" not in done.output
    told = embedded.run("explain", "[red]a[/red]").stdout
    assert "'[red]a[/red]'" in told
    assert "[bold]evil\\x1b[31m" in told


def test_a_store_that_waits_for_hydration_says_so(embedded: Site) -> None:
    fence = embedded.open()
    key = perform(fence, "a")
    fence.inspector.fences.forget_markers(2**60)
    (told,) = embedded.json("explain", key)["keys"]
    assert told["now"] == {"state": "not_ready"}
    assert told["commit"]["attempt"] == 1
    assert "ragfence hydrate" in embedded.run("explain", key).stdout


def test_a_key_of_another_tenant_is_not_there(site: Site) -> None:
    fence = site.open()
    perform(fence, "a")
    other = Operation(kind="ticket", source_id="a", tenant="somebody").key.hex()
    assert key_of(fence, "a") != other
    assert site.run("explain", other).exit_code == 1
