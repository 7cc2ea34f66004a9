"""`ragfence release`: new attempts for what got stuck, and nothing else."""

from __future__ import annotations

import pytest

import ragfence
from ragfence import Operation
from tests.cli.conftest import Site, fail_until_quarantined, key_of, perform
from tests.unit.worlds import abandon, record_of


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
    assert "`ragfence release KEY`" in ragfence.errors.Quarantined("x").hint
    assert "`ragfence release KEY`" in ragfence.errors.EffectFailed("x").hint
