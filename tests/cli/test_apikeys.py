"""`ragfence apikeys`: a token is shown once, and a revoked key never comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragfence.cli.apikeys import RoleName, ScopeName
from ragfence.server.apikeys import ApiKeys
from ragfence.server.scopes import KeyScope, Role
from ragfence.stores.local import LocalObjects
from tests.cli.conftest import Site, run


@pytest.fixture
def keys(embedded: Site) -> ApiKeys:
    """Of the folder that the commands use."""
    embedded.open()
    return ApiKeys(LocalObjects(embedded.folder / ".ragfence" / "objects"))


def test_the_token_stands_alone_on_stdout_and_what_to_do_on_stderr(keys: ApiKeys) -> None:
    done = run("apikeys", "create", "--principal", "loader", "--note", "night shift")
    assert done.exit_code == 0
    asker = keys.check(done.stdout.removesuffix("\n"))
    assert asker is not None
    assert (asker.tenant, asker.principal, asker.scopes) == ("default", "loader", Role.WRITE.scopes)
    assert "not shown again" in done.stderr
    assert f"ragfence apikeys revoke {asker.key_id}" in done.stderr
    assert done.stdout.strip() not in done.stderr


@pytest.mark.parametrize("role", list(Role))
def test_a_key_has_the_role_it_was_given(keys: ApiKeys, role: Role) -> None:
    told = json.loads(run("apikeys", "create", "--role", role, "--tenant", "acme", "--json").stdout)
    asker = keys.check(told["token"])
    assert asker is not None
    assert (asker.scopes, asker.tenant, told["role"], told["expires"]) == (role.scopes, "acme", role, None)


def test_a_key_has_the_scopes_it_was_given(keys: ApiKeys) -> None:
    made = run("apikeys", "create", "--scope", "search", "--scope", "ingest", "--expires", "90d", "--json")
    told = json.loads(made.stdout)
    asker = keys.check(told["token"])
    assert asker is not None
    assert (sorted(asker.scopes), told["role"], told["scopes"]) == (["ingest", "search"], None, ["ingest", "search"])
    (listed,) = json.loads(run("apikeys", "list", "--json").stdout)["keys"]
    assert (listed["role"], listed["scopes"]) == (None, ["ingest", "search"])
    assert "ingest search" in run("apikeys", "list", env={"COLUMNS": "200"}).stdout
    assert "ingest search" in run("apikeys", "create", "--scope", "ingest", "--scope", "search").stderr
    for wrong in (("--scope", "root"), ("--scope", "ingest", "--role", "read")):
        assert run("apikeys", "create", *wrong).exit_code == 2


def test_every_scope_can_be_given() -> None:
    assert [name.value for name in ScopeName] == [scope.value for scope in KeyScope]
    assert [name.value for name in RoleName] == [role.value for role in Role]


def test_the_list_shows_states_and_no_secret(keys: ApiKeys) -> None:
    live, ended = keys.create("default", note="[b]bold[/b]"), keys.create("default", "read", principal="p", ttl_s=0.001)
    gone = keys.create("default", "admin")
    keys.create("other")
    assert run("apikeys", "revoke", gone.key_id).exit_code == 0
    done = run("apikeys", "list")
    assert (done.exit_code, done.stderr) == (0, "")
    states = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()[1:]}
    assert states == {live.key_id: "live", ended.key_id: "expired", gone.key_id: "revoked"}
    assert "[b]bold[/b]" in done.stdout
    as_json = run("apikeys", "list", "--json").stdout
    told = {key["key_id"]: key for key in json.loads(as_json)["keys"]}
    assert (told[gone.key_id]["role"], told[ended.key_id]["principal"]) == ("admin", "p")
    assert told[gone.key_id]["revoked"].endswith("Z")
    for made in (live, ended, gone):
        assert made.token.rpartition("_")[2] not in done.stdout + as_json
    assert "digest" not in as_json


def test_a_tenant_without_keys_is_told_how_to_make_one(keys: ApiKeys) -> None:
    done = run("apikeys", "list", "--tenant", "nobody")
    assert done.exit_code == 0
    assert "`ragfence apikeys create` creates one" in done.stdout


def test_a_revoked_key_is_refused_and_the_second_time_says_so(keys: ApiKeys) -> None:
    made = keys.create("default")
    done = run("apikeys", "revoke", made.key_id)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "all servers refuse it within 10 s" in done.stdout
    assert keys.check(made.token) is None
    assert "already" in run("apikeys", "revoke", made.key_id).stdout
    told = json.loads(run("apikeys", "revoke", made.key_id, "--json").stdout)
    assert told == {"key_id": made.key_id, "tenant": "default", "revoked": False, "servers_notice_s": 10.0}


def test_a_leaked_token_can_be_revoked_as_it_was_found(keys: ApiKeys) -> None:
    made = keys.create("default")
    done = run("apikeys", "revoke", made.token)
    assert done.exit_code == 0
    assert made.token not in done.stdout
    assert keys.check(made.token) is None


def test_only_keys_that_are_there_are_revoked(keys: ApiKeys) -> None:
    made = keys.create("acme")
    for key, said in (
        ("abc", "has no API key"),
        (made.key_id, "has no API key"),
        (made.token, "of tenant 'acme', not of 'default'"),
        (made.token[:-1], "its checksum is wrong"),
    ):
        done = run("apikeys", "revoke", key)
        assert (done.exit_code, done.stdout) == (1, "")
        assert said in done.stderr
        assert "  -> " in done.stderr
    assert keys.check(made.token) is not None


@pytest.mark.parametrize("until", ["90d", "2150-01-01T00:00:00+00:00"])
def test_a_key_may_have_an_end(keys: ApiKeys, until: str) -> None:
    told = json.loads(run("apikeys", "create", "--expires", until, "--json").stdout)
    (key,) = keys.list("default")
    assert key.expires_ms is not None
    if until == "90d":
        assert key.expires_ms - key.created_ms == 90 * 86_400_000
    else:
        assert told["expires"].startswith("2149-12-31T23:59:5") or told["expires"].startswith("2150-01-01T00:00:0")


def test_an_end_that_is_none_is_refused(keys: ApiKeys) -> None:
    assert run("apikeys", "create", "--expires", "soon").exit_code == 2
    done = run("apikeys", "create", "--expires", "2020-01-01T00:00")
    assert done.exit_code == 1
    assert "cannot expire" in done.stderr
    assert run("apikeys", "create", "--role", "root").exit_code == 2
    assert keys.list("default") == []


def test_the_first_key_may_come_before_anything_else(tmp_path: Path) -> None:
    """Somebody who sets up a server makes it first; but looking at keys makes no store."""
    for words in (("list",), ("revoke", "a" * 16)):
        assert "there is no folder of objects" in run("apikeys", *words).stderr
    assert not (tmp_path / ".ragfence").exists()
    done = run("apikeys", "create")
    assert "created a new object store" in done.stderr
    assert ApiKeys(LocalObjects(tmp_path / ".ragfence" / "objects")).check(done.stdout.strip()) is not None


def test_without_an_object_store_there_are_no_keys() -> None:
    done = run("apikeys", "create", "--store", "redis://127.0.0.1:1/0")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "none is named" in done.stderr
    assert "--objects" in done.stderr
