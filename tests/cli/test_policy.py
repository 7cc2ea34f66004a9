"""`ragfence policy check`: what a file comes to, or every problem in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import run

GOOD = """
lease: {ttl_s: 20}
on_conflict: {include_diff: true}
kinds:
  ticket: {class: api, lease_ttl_s: 10, ttl_hours: 72}
"""
BAD = """
lease: {ttl_s: 20, max_attemps: 3}
stores: {ttl: {api_hours: 1}}
wait: {mode: sometimes}
"""


def test_the_effective_settings_are_shown(tmp_path: Path) -> None:
    (tmp_path / "p.yml").write_text(GOOD)
    done = run("policy", "check", "p.yml")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.split()}
    assert lines["lease.ttl_s"] == ["20"]
    assert lines["lease.max_attempts"] == ["5"]
    assert lines["on_conflict.include_diff"] == ["true"]
    assert lines["stores.ttl.webhook_days"] == ["14"]
    assert lines["ticket"] == ["api", "72", "10", "5", "3600", "60"]


def test_what_a_server_does_differently_is_shown(tmp_path: Path) -> None:
    (tmp_path / "p.yml").write_text("lease: {ttl_s: 20}\n")
    shown = [line.split() for line in run("policy", "check", "p.yml").stdout.splitlines()]
    assert ["on_conflict.include_diff", "false", "(over", "HTTP:", "true)"] in shown
    told = json.loads(run("policy", "check", "p.yml", "--json").stdout)
    assert told["over_http"] == {"content_hash": "sha256", "on_conflict.include_diff": "true"}
    (tmp_path / "p.yml").write_text("content_hash: sha256\non_conflict: {include_diff: false}\n")
    assert "over HTTP" not in run("policy", "check", "p.yml").stdout
    assert "over_http" not in json.loads(run("policy", "check", "p.yml", "--json").stdout)


def test_they_are_one_json_document_too(tmp_path: Path) -> None:
    (tmp_path / "p.yml").write_text(GOOD)
    done = run("policy", "check", "p.yml", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, told["file"]) == (0, "", "p.yml")
    assert (told["settings"]["lease"]["ttl_s"], told["settings"]["wait"]["mode"]) == (20, "wait")
    assert told["kinds"]["ticket"]["lease_s"] == 10


def test_every_problem_is_a_line_and_the_end_is_1(tmp_path: Path) -> None:
    (tmp_path / "p.yml").write_text(BAD)
    done = run("policy", "check", "p.yml")
    assert (done.exit_code, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert all(line.startswith("p.yml: ") for line in lines)
    assert any("lease.max_attemps: no such setting; did you mean 'max_attempts'?" in line for line in lines)
    assert any("wait.mode" in line for line in lines)
    told = json.loads(run("policy", "check", "p.yml", "--json").stdout)["error"]
    assert (told["code"], len(told["problems"])) == ("VALIDATION.policy", len(lines))


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such policy file"), ("a: [", "not YAML"), ("- 1", "instead of settings")]
)
def test_a_file_that_cannot_be_read_is_an_error_with_a_hint(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "p.yml").write_text(text)
    done = run("policy", "check", "p.yml")
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr
    assert "  -> " in done.stderr
    assert json.loads(run("policy", "check", "p.yml", "--json").stdout)["error"]["code"] == "VALIDATION.policy"


def test_without_a_file_the_one_that_would_be_used_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("policy", "check").stdout.startswith("no policy file; these are the defaults")
    (tmp_path / "ragfence.yml").write_text(GOOD)
    assert run("policy", "check").stdout.startswith("ragfence.yml")
    (tmp_path / "other.yml").write_text(BAD)
    monkeypatch.setenv("RAGFENCE_POLICY", "other.yml")
    assert run("policy", "check").exit_code == 1


def test_a_policy_of_a_command_is_checked_before_anything_is_opened(tmp_path: Path) -> None:
    (tmp_path / ".ragfence").mkdir()
    (tmp_path / ".ragfence" / "fences.db").touch()
    (tmp_path / "p.yml").write_text(BAD)
    done = run("status", "--policy", "p.yml")
    assert done.exit_code == 1
    assert "no such setting" in done.stderr


def test_a_policy_with_a_secret_says_whether_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ragfence.yml"
    file.write_text("content_hash: hmac\ncontent_secret: {env: HUSH}\n")
    monkeypatch.setenv("COLUMNS", "200")
    lacking = run("policy", "check", str(file))
    assert lacking.exit_code == 0
    assert "the environment variable HUSH is not set: writes of this tenant would be refused here" in lacking.stdout
    monkeypatch.setenv("HUSH", "0123456789abcdef" * 2)
    found = run("policy", "check", str(file), "--json")
    assert json.loads(found.stdout)["content_secret"] == "The secret of tenant 'default' is found, and long enough."
    assert "0123456789abcdef" not in found.stdout
