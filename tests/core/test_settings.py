"""Where stores and policy come from when the caller does not say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragfence.core.policy import Policy
from ragfence.core.settings import Settings, load_policy
from ragfence.errors import PolicyError


def _file(folder: Path, text: str, name: str = "policy.yml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_settings_come_from_four_variables() -> None:
    assert Settings.from_env({}) == Settings(store=None, objects=None, tenant="default", policy=None)
    env = {
        "RAGFENCE_STORE": "redis://h/0",
        "RAGFENCE_OBJECTS": "s3://b/p",
        "RAGFENCE_TENANT": "acme",
        "RAGFENCE_POLICY": "p.yml",
        "RAGFENCE_OTHER": "x",
    }
    assert Settings.from_env(env) == Settings("redis://h/0", "s3://b/p", "acme", "p.yml")


def test_an_empty_variable_is_unset() -> None:
    assert Settings.from_env({"RAGFENCE_TENANT": " ", "RAGFENCE_STORE": ""}) == Settings()


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")
    assert Settings.from_env().tenant == "acme"


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_policy() == Policy()


def test_a_ragfence_yml_in_the_working_directory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path, "lease: {ttl_s: 5}", "ragfence.yml")
    assert load_policy().lease.ttl_s == 5
    assert load_policy(_file(tmp_path, "lease: {ttl_s: 6}")).lease.ttl_s == 6


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "lease:\n  # ttl_s: 5\n"])
def test_a_file_of_comments_is_the_default_policy(tmp_path: Path, text: str) -> None:
    assert load_policy(_file(tmp_path, text)) == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lease: {ttl_s: 5}\nwait: {}\nlease: {ttl_s: 6}\n", "line 3: the key 'lease' stands there twice"),
        ("stores:\n  ttl:\n    api_hours: 48\n    api_hours: 24\n", "line 4: the key 'api_hours'"),
        ("- a\n- b\n", "holds a list instead of settings"),
        ("just text", "holds a str instead of settings"),
        ("lease: {ttl_s: 5\n", "not YAML at line"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML at line 1"),
        ("? [a, b]\n: 1\n", "not YAML at line 1"),
        ("a: \x01\n", "not YAML: "),
        ("lease: {tll_s: 5}\n", "lease.tll_s: no such setting; did you mean 'ttl_s'?"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_place(tmp_path: Path, text: str, message: str) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(PolicyError) as refused:
        load_policy(file)
    assert refused.value.message.startswith(f"{file}: ")
    assert message in refused.value.message


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.yml"
    with pytest.raises(PolicyError, match="no such policy file") as refused:
        load_policy(str(file))
    assert str(file) in refused.value.message
    assert "RAGFENCE_POLICY" in refused.value.hint


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="is a folder, not a regular file"):
        load_policy(tmp_path)
    file = tmp_path / "latin.yml"
    file.write_bytes(b"# caf\xe9\n")
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(file)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "line 5: more than 10,000 values, with those that aliases repeat"),
        (MERGES, "line 5: more than 10,000 values, with those that aliases repeat"),
        ("lease: [" + "a, " * 10_001 + "]\n", "line 1: more than 10,000 values"),
        ("redaction:\n  fields: &a [*a]\n", "line 2: the anchor &a contains itself"),
        ("lease: &a\n  <<: *a\n", "line 2: the anchor &a contains itself"),
        ("a: &a [1]\nb: &a {c: *a}\n", "not YAML at line 2"),
        ("lease: " + "[" * 100_000, "line 1: nested more than 20 levels deep"),
        ("lease: " + "{a: " * 50_000, "line 1: nested more than 20 levels deep"),
        ("- " * 50_000, "line 1: nested more than 20 levels deep"),
        ("lease: {ttl_s: " + "1:" * 100_000 + "1}\n", "line 1: a number of more than 100 characters"),
        ("lease: {ttl_s: " + "9" * 5_000 + "}\n", "line 1: a number of more than 100 characters"),
        ("lease: {ttl_s: 2026-02-30}\n", "not YAML: day"),
        ("# " + "x" * 2**18, "is larger than 262,144 bytes"),
    ],
    ids=lambda text: text[:30],
)
def test_a_file_that_is_larger_than_it_looks_is_refused_soon(tmp_path: Path, text: str, message: str) -> None:
    file = _file(tmp_path, text)
    begun = time.monotonic()
    with pytest.raises(PolicyError) as refused:
        load_policy(file)
    assert message in refused.value.message
    assert refused.value.message.startswith(f"{file}: ")
    assert refused.value.hint
    assert time.monotonic() - begun < 5


def test_anchors_and_aliases_of_usual_size_are_fine(tmp_path: Path) -> None:
    # The nested mapping that is merged into a later one is made after that: its own keys are not there twice.
    text = (
        "kinds:\n  a: &a {lease_ttl_s: 5}\n  b: &b {<<: *a, lease_ttl_s: 6}\n  c: {<<: *b, max_attempts: 2}\n"
        "lease: {ttl_s: 7}\n"
    )
    policy = load_policy(_file(tmp_path, text))
    assert [policy.for_kind(kind).lease_ms for kind in "abcd"] == [5000, 6000, 6000, 7000]
    assert policy.for_kind("c").max_attempts == 2


@pytest.mark.parametrize("name", ["pipe", "device", "folder"])
def test_a_policy_that_is_no_regular_file_is_refused_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also `ragfence.yml` in the working directory: the defaults instead of a policy would be a surprise."""
    file = tmp_path / "ragfence.yml"
    if name == "pipe":
        os.mkfifo(file)
    elif name == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    monkeypatch.chdir(tmp_path)
    for given in (file, None):
        with pytest.raises(PolicyError, match=f"is a {name}, not a regular file"):
            load_policy(given)


def test_a_link_to_a_policy_that_is_gone_is_not_the_default_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ragfence.yml").symlink_to(tmp_path / "gone.yml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match="there is no such policy file"):
        load_policy()


def test_settings_load_neither_pydantic_nor_yaml() -> None:
    code = (
        "import sys, ragfence.core.settings, ragfence.core.key_strategies, ragfence.core.diffs\n"
        "print([name for name in ('pydantic', 'yaml', 'jsonpatch', 'pyarrow') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
