"""`ragfence release`: new attempts for what got stuck, and nothing else."""

from __future__ import annotations

import pytest

import ragfence
from ragfence import Operation
from tests.cli.conftest import Site, fail_until_quarantined, key_of, perform
from tests.engine.worlds import abandon, record_of


@pytest.mark.parametrize("form", ["key", "beginning"])
@pytest.mark.parametrize("more", [{}, {"sequence": 3}], ids=["plain", "ordered"])
def test_a_quarantined_key_gets_new_attempts(site: Site, form: str, more: dict) -> None:
    fence = site.open(lease={"max_attempts": 2})
    key = fail_until_quarantined(fence, "stuck", **more)
    done = site.run("release", key if form == "key" else key[:14])
    assert done.exit_code == 0, done.output
    assert f"released {key}" in done.stdout
    assert "quarantined after 2 attempts, last error RuntimeError" in done.stdout
    assert perform(fence, "stuck", **more) == key
    assert fence.audit.explain(key).events[-1].what == "sealed"


def test_a_failure_is_taken_back(site: Site) -> None:
    fence = site.open()
    with pytest.raises(ragfence.errors.TerminalError), fence.claim(Operation(kind="ticket", source_id="a")):
        raise ragfence.errors.TerminalError("final")
    key = key_of(fence, "a")
    told = site.json("release", key)
    assert told == {"key": key, "released": True, "was": {"state": "failed", "attempt": 1, "error_code": "TERMINAL"}}
    assert perform(fence, "a") == key


def test_what_is_sealed_stays_sealed(site: Site) -> None:
    key = perform(site.open(), "a")
    done = site.run("release", key)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "its effect happened" in done.stderr
    assert site.json("release", key, code=1)["error"]["retryable"] is False


def test_a_held_key_is_freed_and_what_it_was_is_told(site: Site) -> None:
    fence = site.open()
    abandon(fence, Operation(kind="ticket", source_id="a"))
    done = site.run("release", key_of(fence, "a"), "--yes")
    assert "held by worker-7, attempt 1, lease ends in" in done.stdout
    assert record_of(fence, key_of(fence, "a")).state.name == "RELEASED"


@pytest.mark.parametrize("key", ["doc-1", "abc", "zz" * 33, "00" * 33, "3f" * 5, "fe" * 33])
def test_what_is_no_key_of_ours_is_an_error(site: Site, key: str) -> None:
    perform(site.open(), "doc-1")
    done = site.run("release", key)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "->" in done.stderr


def test_a_key_without_anything_to_release_is_an_error(site: Site) -> None:
    fence = site.open()
    perform(fence, "s", sequence=3)
    with pytest.raises(ragfence.errors.Stale):
        perform(fence, "s", sequence=2)
    done = site.run("release", key_of(fence, "s", sequence=2))
    assert done.exit_code == 1
    assert "nothing to release" in done.stderr


def test_the_errors_of_the_library_name_the_command() -> None:
    for kind in (ragfence.errors.Quarantined, ragfence.errors.EffectFailed):
        assert "fence.release(key)" in kind("x").hint
        assert "`ragfence release KEY`" in ragfence.errors.hint_on("cli", kind("x").hint)


class TestQuery:
    """`ragfence release --state ... --error ...`: many keys at once."""

    def test_all_keys_that_match_get_new_attempts_and_no_others(self, site: Site) -> None:
        fence = site.open(lease={"max_attempts": 2})
        stuck = [fail_until_quarantined(fence, f"s{at}", **({"sequence": 3} if at % 2 else {})) for at in range(4)]
        other = fail_until_quarantined(fence, "other", kind="refund")
        perform(fence, "fine")
        told = site.json("release", "--error", "Runtime*", "--kind", "ticket")
        assert (told["released"], told["count"], told["more"]) == (True, 4, False)
        assert {each["key"] for each in told["keys"]} == set(stuck)
        assert {(each["kind"], each["attempt"], each["error_code"]) for each in told["keys"]} == {
            ("ticket", 2, "RuntimeError")
        }
        for at in range(4):
            assert perform(fence, f"s{at}", **({"sequence": 3} if at % 2 else {})) in stuck
        assert record_of(fence, other).state.name == "QUARANTINED"
        assert site.json("release", "--state", "quarantined", "--error", "STORE.*")["count"] == 0

    def test_a_dry_run_lists_and_changes_nothing(self, site: Site) -> None:
        fence = site.open(lease={"max_attempts": 2})
        key = fail_until_quarantined(fence, "bad")
        done = site.run("release", "--state", "quarantined", "--dry-run")
        assert done.exit_code == 0, done.output
        assert key[:8] in done.stdout
        assert "would release 1 key" in done.stdout
        assert site.json("release", "--state", "quarantined", "--dry-run")["released"] is False
        assert record_of(fence, key).state.name == "QUARANTINED"

    def test_no_more_than_the_limit_are_released_at_a_time(self, site: Site) -> None:
        fence = site.open(lease={"max_attempts": 1})
        stuck = {fail_until_quarantined(fence, f"s{at}") for at in range(5)}
        found: set[str] = set()
        for count, more in ((2, True), (2, True), (1, False)):
            told = site.json("release", "--state", "quarantined", "--limit", "2")
            assert (told["count"], told["more"]) == (count, more)
            found |= {each["key"] for each in told["keys"]}
        assert found == stuck

    def test_what_somebody_holds_is_not_touched(self, site: Site) -> None:
        fence = site.open()
        claimed = abandon(fence, Operation(kind="ticket", source_id="a"))
        for state in ("quarantined", "released"):
            assert site.json("release", "--state", state)["count"] == 0
        claimed.lease.check()
        assert record_of(fence, key_of(fence, "a")).state.name == "HELD"

    def test_a_key_that_was_given_back_gets_its_attempts_back_once(self, site: Site) -> None:
        fence = site.open()
        with pytest.raises(RuntimeError), fence.claim(Operation(kind="ticket", source_id="a")):
            raise RuntimeError
        assert [site.json("release", "--state", "released")["count"] for _ in range(2)] == [1, 0]

    def test_documents_are_released_too(self, embedded: Site) -> None:
        class Refusing:
            name, version, parameters = "refusing", "1", {}

            def split(self, text: str) -> list:
                raise ragfence.errors.FormatCorrupt(text)

        fence = embedded.open(lease={"max_attempts": 1})
        docs = [ragfence.Document(f"d{at}", f"text {at}") for at in range(3)]
        for _ in range(2):
            fence.documents.using(chunker=Refusing()).ingest_many(docs)
        told = embedded.json("release", "--state", "quarantined", "--error", "FORMAT.*")
        assert (told["count"], {each["kind"] for each in told["keys"]}) == (3, {"document"})
        assert embedded.json("release", "--state", "quarantined")["count"] == 0

    @pytest.mark.parametrize("words", [(), ("00" * 33, "--state", "quarantined")])
    def test_either_a_key_or_a_query(self, embedded: Site, words: tuple) -> None:
        done = embedded.run("release", *words)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "ragfence release --state quarantined" in done.stderr
