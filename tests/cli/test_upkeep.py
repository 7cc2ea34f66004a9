"""`ragfence hydrate`, `ragfence purge-expired`, `ragfence decisions` and `ragfence audit check`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import ragfence
from ragfence.core.decision_rows import Row
from ragfence.core.layout import FINGERPRINT_BYTES, SEAL_POSITION, TOKEN_BYTES, RowKind
from ragfence.core.operations import FenceNumber
from ragfence.stores.local import LocalObjects
from ragfence.stores.sqlite import SqliteFences
from tests.cli.conftest import Site, key_of, perform

DAY_MS = 86_400_000


def long_ago(days: int, *sources: str) -> list[str]:
    """What somebody did in `.ragfence/` that many days before now."""
    folder = Path(".ragfence")
    store = SqliteFences(folder / "fences.db", clock=lambda: time.time_ns() // 1_000_000 - days * DAY_MS)
    with ragfence.open(store, objects=LocalObjects(folder / "objects")) as fence:
        keys = [perform(fence, source) for source in sources]
    for file in folder.rglob("sealed/**/*"):
        if file.is_file():
            os.utime(file, (time.time() - days * 86_400,) * 2)
    return keys


def test_a_fence_file_that_is_gone_is_rebuilt(embedded: Site) -> None:
    perform(embedded.open(), "a")
    embedded.opened.pop().close()
    for file in Path(".ragfence").glob("fences.db*"):
        file.unlink()
    told = embedded.json("hydrate")
    assert (told["epoch"], told["ready"]) == (2, 64)
    assert embedded.json("status")["shards"]["ready"] == 64
    assert "epoch 3: 64 shards ready" in embedded.run("hydrate").stdout


def test_a_server_is_hydrated_from_its_objects(site: Site) -> None:
    perform(site.open(), "a")
    done = site.run("hydrate")
    if site.name == "valkey alone":
        assert (done.exit_code, done.stdout) == (1, "")
        assert "nothing to hydrate from" in done.stderr
        assert site.json("hydrate", code=1)["error"]["code"] == "USAGE.objects_required"
    else:
        assert done.exit_code == 0
        assert "64 shards ready" in done.stdout


@pytest.mark.parametrize(
    "command", ["status", "keys", "explain x", "release x", "decisions", "audit check", "hydrate", "purge-expired"]
)
def test_no_command_makes_a_store_where_there_is_none(embedded: Site, command: str) -> None:
    done = embedded.run(*command.split())
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no" in done.stderr
    assert "--store" in done.stderr
    assert not Path(".ragfence").exists()


@pytest.mark.parametrize("batch", ["1", "2", "1000"])
def test_what_had_its_time_is_purged_and_the_rest_stays(embedded: Site, batch: str) -> None:
    old = long_ago(60, "a", "b", "c")
    young = perform(embedded.open(), "d")
    assert embedded.json("status")["expired"] == 3
    told = embedded.json("purge-expired", "--batch", batch)
    assert (told["objects"], told["complete"]) == (3, True)
    assert told["records"] >= 3
    assert told["scanned"] >= 4
    assert [event["what"] for event in embedded.json("explain", old[0])["keys"][0]["events"]][-1] in (
        "ended",
        "released",
    )
    assert embedded.json("explain", old[0])["keys"][0]["commit"] is None
    assert embedded.json("explain", young)["keys"][0]["commit"] is not None
    assert embedded.json("audit", "check")["ok"]
    again = embedded.json("purge-expired", "--batch", batch)
    assert (again["objects"], again["complete"]) == (0, True)
    assert embedded.json("status")["expired"] == 0


def test_a_limit_bounds_the_steps_and_says_that_there_is_more(embedded: Site) -> None:
    long_ago(60, *(f"s{number}" for number in range(6)))
    done = embedded.run("purge-expired", "--batch", "1", "--limit", "2")
    assert done.exit_code == 0
    assert "deleted 2 records" in done.stdout
    assert "there is more" in done.stdout
    told = embedded.json("purge-expired", "--batch", "1", "--limit", "1")
    assert (told["records"], told["steps"], told["complete"]) == (1, 1, False)
    for _ in range(2):  # what the first leaves of the keys it ended, the second takes away
        assert embedded.json("purge-expired")["complete"]
    assert embedded.json("status")["expired"] == 0
    assert embedded.json("status")["records"] == []


def test_more_records_than_objects_are_all_purged(tmp_path: Path) -> None:
    """The fence file of a fence without objects: there is no object to go on after."""
    store = SqliteFences(tmp_path / "f.db", solo=True, clock=lambda: time.time_ns() // 1_000_000 - 60 * DAY_MS)
    with ragfence.open(store) as fence:
        for number in range(7):
            perform(fence, f"s{number}")
    (tmp_path / "o").mkdir()
    site = Site("file", tmp_path, ("--store", f"sqlite:///{tmp_path}/f.db", "--objects", str(tmp_path / "o")), {})
    told = site.json("purge-expired", "--batch", "2")
    assert (told["records"], told["objects"], told["complete"]) == (7, 0, True)


def test_nothing_is_purged_on_a_server_that_does_it_by_itself(site: Site) -> None:
    perform(site.open(), "a")
    told = site.json("purge-expired")
    assert (told["records"], told["objects"], told["complete"]) == (0, 0, True)


def test_decisions_are_listed_newest_last_and_filtered(site: Site) -> None:
    fence = site.open()
    for source in ("a", "a", "b"):
        perform(fence, source)
        time.sleep(0.002)  # within a millisecond shards have no order
    perform(fence, "a", kind="mail")
    told = site.json("decisions")
    assert told["of"] == len(told["decisions"]) == 7
    assert [row["ts"] for row in told["decisions"]] == sorted(row["ts"] for row in told["decisions"])
    assert told["decisions"][0]["idempotency_key"] == key_of(fence, "a")
    assert told["decisions"][0]["ts"].endswith("Z")
    assert site.json("decisions", "--kind", "mail")["of"] == 2
    assert site.json("decisions", "--source-id", "b")["of"] == 2
    (one,) = site.json("decisions", "--decision", "duplicate")["decisions"]
    assert (one["source_id"], one["owner"], one["run_id"]) == ("a", "worker-7", "run-1")
    newest = site.json("decisions", "--limit", "2")
    assert (newest["of"], newest["decisions"]) == (7, told["decisions"][-2:])
    assert len(site.json("decisions", "--limit", "0")["decisions"]) == 7
    assert site.json("decisions", "--since", "2030-01-01T00:00")["of"] == 0
    text = site.run("decisions", "--limit", "2").stdout
    assert len(text.splitlines()) == 4
    assert "the newest 2 of 7" in text


@pytest.mark.parametrize("wrong", [["--since", "soon"], ["--decision", "maybe"], ["--limit", "x"]])
def test_wrong_usage_ends_with_2(embedded: Site, wrong: list[str]) -> None:
    perform(embedded.open(), "a")
    done = embedded.run("decisions", *wrong)
    assert (done.exit_code, done.stdout) == (2, "")


def test_the_audit_passes_on_what_is_honest(site: Site) -> None:
    perform(site.open(), "a")
    assert site.json("audit", "check") == {"ok": True, "rows": 2, "keys": 1, "findings": []}
    assert "2 rows over 1 key: every promise kept" in site.run("audit", "check").stdout


def test_the_audit_ends_with_1_and_names_what_is_broken(site: Site) -> None:
    fence = site.open()
    key = bytes.fromhex(perform(fence, "a"))
    now_ms = fence.inspector.fences.now_ms()
    (sealed,) = [row for row in fence.audit.rows() if row.position == SEAL_POSITION]
    forged = Row(
        token=b"x" * TOKEN_BYTES,
        position=SEAL_POSITION,
        ts_ms=now_ms,
        kind=RowKind.NEW,
        key=key,
        fingerprint=bytes(FINGERPRINT_BYTES),
        fence=FenceNumber(sealed.fence.epoch, sealed.fence.counter + 1),
        sealed_at_ms=now_ms,
        winner=b"x" * TOKEN_BYTES,
    )
    fence.inspector.fences.record([forged])
    told = site.json("audit", "check", code=1)
    assert not told["ok"]
    assert "one_seal" in {finding["invariant"] for finding in told["findings"]}
    assert all(finding["key"] == key.hex() for finding in told["findings"])
    done = site.run("audit", "check")
    assert done.exit_code == 1
    assert "one_seal" in done.stdout
    assert key.hex() in done.stdout
