"""API keys: whom a token lets in, and that nothing else does."""

from __future__ import annotations

import json
import secrets
import string
import threading
from base64 import b32encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable, ValidationError
from ragfence.server.apikeys import (
    ABSENT_S,
    FOLDER,
    MAX_TOKEN_CHARACTERS,
    UNKNOWN,
    ApiCaller,
    ApiKeys,
    CachedKeys,
    Denial,
    _checksum,
    _digest,
    _packed,
    _token,
    parse_token,
)
from ragfence.server.scopes import KeyScope, Role
from ragfence.stores.local import LocalObjects
from ragfence.stores.s3 import S3Objects
from ragfence.testing.memory import FaultyObjects, MemoryObjects
from tests.servers import S3Server

GOLDEN = "rf_mfrw2zi_abcdefghij234567_aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypqn2zu3na"
ALPHABET = string.ascii_lowercase + "234567"

tenants = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
any_text = st.text(st.characters(exclude_categories=()), max_size=600)


class Hands:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_role_is_a_set_of_scopes_and_none_but_admin_may_administer() -> None:
    assert Role.READ.scopes < Role.WRITE.scopes < Role.ADMIN.scopes == frozenset(KeyScope)
    assert Role.READ.scopes == {KeyScope.SEARCH, KeyScope.AUDIT}
    assert KeyScope.ADMIN not in Role.WRITE.scopes


def test_a_key_has_the_scopes_it_was_given_and_a_role_is_stored_as_ever() -> None:
    objects = MemoryObjects()
    keys = ApiKeys(objects)
    made = keys.create("acme", scopes=["search", "ingest"])
    asker = keys.check(made.token)
    assert asker is not None
    assert asker.scopes == made.scopes == {KeyScope.INGEST, KeyScope.SEARCH}
    (stored,) = keys.list("acme")
    assert (stored.role, stored.grants()) == (None, "ingest search")
    values = json.loads(objects.get(f"acme/{FOLDER}/{made.key_id}/made") or b"")
    assert (values["version"], values["scopes"]) == (2, ["ingest", "search"])
    old = keys.create("acme", "write")
    values = json.loads(objects.get(f"acme/{FOLDER}/{old.key_id}/made") or b"")
    assert (values["version"], values["role"], "scopes" in values) == (1, "write", False)


def test_a_key_that_was_stored_with_a_role_keeps_working() -> None:
    """As the first version wrote it, byte for byte."""
    objects = MemoryObjects()
    stored = (
        b'{"created_ms":1,"digest":"ed78cbf89a9c03abd4fc9924619f92a5d608a17000fe301aab1ee0f51ced6a4e",'
        b'"expires_ms":null,"note":"","principal":"loader","role":"write","version":1}'
    )
    objects.put_new(f"acme/{FOLDER}/abcdefghij234567/made", stored)
    assert ApiKeys(objects).check(GOLDEN) == ApiCaller("acme", "loader", Role.WRITE.scopes, "abcdefghij234567")
    assert ApiKeys(objects).list("acme")[0].encode() == stored


def test_a_token_lets_in_whom_it_was_made_for(tmp_path: Path) -> None:
    keys = ApiKeys(LocalObjects(tmp_path))
    made = keys.create("acme", "admin", principal="loader", note="of the night shift")
    assert keys.check(made.token) == ApiCaller("acme", "loader", frozenset(KeyScope), made.key_id)
    assert ApiKeys(LocalObjects(tmp_path)).check(made.token) is not None
    (stored,) = keys.list("acme")
    assert (stored.key_id, stored.role, stored.note) == (made.key_id, Role.ADMIN, "of the night shift")


def test_a_key_without_a_principal_is_one_of_its_own() -> None:
    keys = ApiKeys(MemoryObjects())
    one, other = keys.create("acme"), keys.create("acme")
    assert (one.principal, other.principal) == (one.key_id, other.key_id)
    assert one.role is Role.WRITE


def test_a_rotated_key_keeps_its_principal() -> None:
    keys = ApiKeys(MemoryObjects())
    old, new = keys.create("acme", principal="loader"), keys.create("acme", principal="loader")
    assert keys.revoke("acme", old.key_id)
    asker = keys.check(new.token)
    assert asker is not None
    assert (asker.principal, keys.check(old.token)) == ("loader", None)


def test_the_secret_is_stored_nowhere_and_shown_once(tmp_path: Path) -> None:
    made = ApiKeys(LocalObjects(tmp_path)).create("acme")
    parts = parse_token(made.token)
    assert parts is not None
    spellings = (parts.secret, parts.secret.hex().encode(), _packed(parts.secret).encode(), made.token.encode())
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert stored
    assert not [spelling for spelling in spellings if spelling in stored]
    assert made.token not in repr(made)
    assert made.token not in f"{made}"


def test_the_spelling_and_the_digest_of_a_token_are_held_still() -> None:
    """A change would lock out everybody who has one."""
    assert _token("acme", "abcdefghij234567", bytes(range(32))) == GOLDEN
    assert parse_token(GOLDEN) == ("acme", "abcdefghij234567", bytes(range(32)))
    stored = _digest("acme", "abcdefghij234567", bytes(range(32)))
    assert stored.hex() == "ed78cbf89a9c03abd4fc9924619f92a5d608a17000fe301aab1ee0f51ced6a4e"


@given(tenants)
def test_any_tenant_that_can_be_named_comes_back_out_of_its_token(tenant: str) -> None:
    """The token alone says whose it is, whatever the name is made of."""
    keys = ApiKeys(MemoryObjects())
    try:
        made = keys.create(tenant)
    except ValidationError:
        assert len(encoded(tenant)) > 255
        return
    asker = keys.check(made.token)
    assert asker is not None
    assert asker.tenant == made.tenant
    assert len(made.token) <= MAX_TOKEN_CHARACTERS
    assert set(made.token) <= set(ALPHABET) | {"_"}


@given(any_text | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
def test_garbage_lets_nobody_in_and_raises_nothing(text: str) -> None:
    """Of any bytes and any length, also behind the right prefix."""
    keys = ApiKeys(MemoryObjects())
    cached = CachedKeys(keys)
    for token in (text, f"rf_{text}", f"rf_{text}_{'a' * 16}_{'a' * 59}", text * 50):
        assert keys.check(token) is None
        assert cached.known(token) in (UNKNOWN, Denial.INVALID)
        assert cached.check(token) is Denial.INVALID


@given(st.binary(min_size=1, max_size=300), st.binary(min_size=32, max_size=32), st.booleans())
def test_a_forged_token_with_a_right_checksum_lets_nobody_in(tenant: bytes, secret: bytes, padded: bool) -> None:
    """Anybody can compute a checksum: tenants of any bytes then reach the store, and find nothing."""
    text = b32encode(tenant).decode().lower().rstrip("=") + ("a" if padded else "")
    body = f"rf_{text}_{'a' * 16}_{_packed(secret)}"
    assert ApiKeys(MemoryObjects()).check(body + _checksum(body)) is None


@given(st.integers(min_value=0), st.sampled_from(ALPHABET + "_ -A\n\x00é"))
def test_a_token_with_one_changed_character_is_refused_before_any_store_is_asked(at: int, char: str) -> None:
    """The checksum finds it, so a mistyped token costs no request."""
    objects = FaultyObjects(MemoryObjects())
    token = ApiKeys(objects.inner).create("acme").token
    at %= len(token)
    changed = token[:at] + char + token[at + 1 :]
    if changed == token:
        return
    assert ApiKeys(objects).check(changed) is None
    assert not objects.calls


@pytest.mark.parametrize("wrong", ["", " ", "Bearer x", "rf_", "rf___", "\ud800", "rf_" + "a" * 10**6, "\n"])
def test_what_is_no_token_is_refused(wrong: str) -> None:
    token = ApiKeys(objects := MemoryObjects()).create("acme").token
    for text in (wrong, token + wrong if wrong else token[:-1], f" {token}", f"{token}\n", token.upper()):
        assert ApiKeys(objects).check(text) is None


def test_the_right_id_with_another_secret_is_refused() -> None:
    keys = ApiKeys(MemoryObjects())
    made = keys.create("acme")
    assert keys.check(_token("acme", made.key_id, secrets.token_bytes(32))) is None


def test_a_key_of_one_tenant_never_answers_for_another() -> None:
    """Neither renamed in the token, nor copied in the store: the tenant is part of the digest."""
    objects = MemoryObjects()
    keys = ApiKeys(objects)
    made = keys.create("a", "admin")
    keys.create("b")
    parts = parse_token(made.token)
    assert parts is not None
    renamed = _token("b", parts.key_id, parts.secret)
    assert keys.check(renamed) is None
    objects.put_new(f"b/{FOLDER}/{parts.key_id}/made", objects.get(f"a/{FOLDER}/{parts.key_id}/made") or b"")
    assert keys.check(renamed) is None
    assert [key.key_id for key in keys.list("a")] == [made.key_id]
    with pytest.raises(ValidationError, match="has no API key"):
        keys.revoke("c", made.key_id)


def test_names_of_which_one_begins_like_the_other_are_different_tenants() -> None:
    keys = ApiKeys(MemoryObjects())
    for tenant in ("a", "a/b", "a b", "a%2Fb", "A", "a_b"):
        keys.create(tenant)
    assert [len(keys.list(tenant)) for tenant in ("a", "a/b", "a b", "a%2Fb", "A", "a_b")] == [1] * 6


def test_an_unknown_key_takes_the_way_of_a_known_one() -> None:
    """As many requests, so that nobody learns by the clock which ids exist."""
    objects = FaultyObjects(MemoryObjects())
    keys = ApiKeys(objects)
    made = keys.create("acme")
    for token in (made.token, _token("acme", "b" * 16, bytes(32)), _token("acme", made.key_id, bytes(32))):
        objects.calls.clear()
        keys.check(token)
        assert objects.calls == {"get": 2}


def test_an_expired_key_is_refused() -> None:
    now = [1_000_000]
    keys = ApiKeys(MemoryObjects(), now_ms=lambda: now[0])
    made = keys.create("acme", ttl_s=60)
    assert keys.check(made.token) is not None
    now[0] += 59_999
    assert keys.check(made.token) is not None
    now[0] += 1
    assert keys.check(made.token) is None
    assert keys.list("acme")[0].state(now[0]) == "expired"


def test_of_many_who_revoke_one_does_and_the_key_is_dead_at_once(tmp_path: Path) -> None:
    keys = ApiKeys(LocalObjects(tmp_path))
    made = keys.create("acme")
    together = threading.Barrier(8)

    def revoke(_: int) -> bool:
        together.wait()
        revoked = keys.revoke("acme", made.key_id)
        assert keys.check(made.token) is None  # also for whoever came second
        return revoked

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(revoke, range(8))) == [False] * 7 + [True]
    (stored,) = keys.list("acme")
    assert stored.state(0) == "revoked"
    assert stored.revoked_ms is not None


def test_a_revocation_that_comes_between_the_two_questions_of_a_check_counts() -> None:
    objects = FaultyObjects(MemoryObjects())
    plain, keys = ApiKeys(objects.inner), ApiKeys(objects)
    made = plain.create("acme")

    class Late(MemoryObjects):
        """Revokes after the key itself was read."""

        def get(self, name: str) -> bytes | None:
            found = objects.inner.get(name)
            if name.endswith("/made"):
                plain.revoke("acme", made.key_id)
            return found

    assert keys.check(made.token) is not None
    assert ApiKeys(Late()).check(made.token) is None


@pytest.mark.parametrize(
    ("wrong", "given_"),
    [
        ("not a valid tenant", {"tenant": ""}),
        ("not a valid tenant", {"tenant": "é" * 100}),
        ("control character", {"tenant": "a\nb"}),
        ("not a valid role", {"role": "root"}),
        ("not a valid scope", {"scopes": ["ingest", "root"]}),
        ("at least one scope", {"scopes": []}),
        ("not both", {"scopes": ["ingest"], "role": "read"}),
        ("cannot expire", {"ttl_s": 0}),
        ("cannot expire", {"ttl_s": float("nan")}),
        ("longer than", {"note": "n" * 201}),
        ("longer than", {"principal": "n" * 129}),
    ],
)
def test_a_key_that_cannot_be_is_not_made(wrong: str, given_: dict[str, Any]) -> None:
    objects = MemoryObjects()
    with pytest.raises(ValidationError, match=wrong):
        ApiKeys(objects).create(**{"tenant": "acme", **given_})
    assert not list(objects.list(""))


def test_a_stored_key_of_a_newer_format_is_refused_and_not_guessed() -> None:
    objects = MemoryObjects()
    keys = ApiKeys(objects)
    made = keys.create("acme")
    name = f"acme/{FOLDER}/{made.key_id}/made"
    values = json.loads(objects.get(name) or b"")
    for data, error in (
        (json.dumps({**values, "version": 3}), FormatTooNew),
        ("{}", FormatCorrupt),
        ("[", FormatCorrupt),
    ):
        objects.delete([name])
        objects.put_new(name, data.encode())
        with pytest.raises(error):
            keys.check(made.token)
    assert keys.revoke("acme", made.key_id)  # even what nobody can read


def test_what_is_known_is_answered_without_asking() -> None:
    objects, clock = FaultyObjects(MemoryObjects()), Hands()
    keys = ApiKeys(objects)
    cached = CachedKeys(keys, clock=clock)
    made, wrong = keys.create("acme"), _token("acme", "b" * 16, bytes(32))
    assert cached.known(made.token) is UNKNOWN
    asker = cached.check(made.token)
    assert cached.check(wrong) is Denial.INVALID
    objects.on("get").fail_before(times=100)
    assert cached.known(made.token) == asker == cached.check(made.token)
    assert cached.known(wrong) is cached.check(wrong) is Denial.INVALID


def test_a_revoked_key_is_refused_once_it_is_not_fresh() -> None:
    objects, clock = MemoryObjects(), Hands()
    keys = ApiKeys(objects)
    cached = CachedKeys(keys, fresh_s=10.0, clock=clock)
    made = keys.create("acme")
    cached.check(made.token)
    keys.revoke("acme", made.key_id)
    clock.now += 9.9
    assert isinstance(cached.known(made.token), ApiCaller)
    clock.now += 0.1
    assert cached.known(made.token) is UNKNOWN
    assert cached.check(made.token) is Denial.REVOKED
    assert cached.known(made.token) is Denial.REVOKED


def test_a_new_key_that_was_refused_before_it_was_there_gets_in_once_that_is_not_fresh() -> None:
    objects, clock = MemoryObjects(), Hands()
    keys = ApiKeys(objects)
    made = keys.create("acme")
    name = f"acme/{FOLDER}/{made.key_id}/made"
    data = objects.get(name) or b""
    objects.delete([name])
    cached = CachedKeys(keys, clock=clock)
    assert cached.check(made.token) is Denial.INVALID
    objects.put_new(name, data)
    assert cached.check(made.token) is Denial.INVALID
    clock.now += ABSENT_S
    assert isinstance(cached.check(made.token), ApiCaller)


def test_a_slow_answer_is_fresh_from_when_it_was_asked() -> None:
    """It may have been overtaken by a revocation on its way."""
    clock = Hands()

    class Slow(MemoryObjects):
        def get(self, name: str) -> bytes | None:
            found = super().get(name)
            clock.now += 6
            return found

    keys = ApiKeys(Slow())
    made = keys.create("acme")
    cached = CachedKeys(keys, fresh_s=10.0, clock=clock)
    assert isinstance(cached.check(made.token), ApiCaller)  # 12 seconds
    assert cached.known(made.token) is UNKNOWN


def test_who_cannot_be_checked_is_not_let_in() -> None:
    objects, clock = FaultyObjects(MemoryObjects()), Hands()
    keys = ApiKeys(objects)
    cached = CachedKeys(keys, clock=clock)
    made = keys.create("acme")
    assert isinstance(cached.check(made.token), ApiCaller)
    objects.on("get").fail_before(times=2)
    clock.now += 10
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            cached.check(made.token)
        assert cached.known(made.token) is UNKNOWN
    assert isinstance(cached.check(made.token), ApiCaller)


def test_a_flood_of_wrong_tokens_pushes_out_nobody_who_was_let_in() -> None:
    objects = FaultyObjects(MemoryObjects())
    keys = ApiKeys(objects)
    cached = CachedKeys(keys, max_entries=10, clock=Hands())
    made = [keys.create("acme") for _ in range(10)]
    for each in made:
        cached.check(each.token)
    wrong = [_token("acme", _packed(number.to_bytes(10, "big")), bytes(32)) for number in range(200)]
    for token in wrong:
        assert cached.check(token) is Denial.INVALID
    assert all(isinstance(cached.known(each.token), ApiCaller) for each in made)
    assert [cached.known(token) for token in wrong[-10:]] == [Denial.INVALID] * 10
    assert cached.known(wrong[0]) is UNKNOWN  # bounded


def test_wrong_secrets_of_one_key_ask_the_store_once_and_lock_nobody_out() -> None:
    objects = FaultyObjects(MemoryObjects())
    keys = ApiKeys(objects)
    cached = CachedKeys(keys, clock=Hands())
    made = keys.create("acme")
    objects.calls.clear()
    for number in range(200):
        assert cached.check(_token("acme", made.key_id, number.to_bytes(32, "big"))) is Denial.INVALID
    for number in range(200):  # an id that is not there, many secrets
        assert cached.check(_token("acme", "b" * 16, number.to_bytes(32, "big"))) is Denial.INVALID
    assert isinstance(cached.known(made.token), ApiCaller)
    assert objects.calls == {"get": 4}


def test_that_a_key_has_ended_is_said_to_its_holder_only() -> None:
    now = [1_000_000]
    keys = ApiKeys(MemoryObjects(), now_ms=lambda: now[0])
    expired, revoked = keys.create("acme", ttl_s=60), keys.create("acme")
    keys.revoke("acme", revoked.key_id)
    now[0] += 60_000
    cached = CachedKeys(keys)
    assert cached.check(expired.token) is Denial.EXPIRED
    assert cached.check(revoked.token) is Denial.REVOKED
    for made in (expired, revoked):
        assert cached.check(_token("acme", made.key_id, bytes(32))) is Denial.INVALID


def test_of_the_keys_that_were_let_in_the_one_not_seen_for_longest_makes_room() -> None:
    keys = ApiKeys(MemoryObjects())
    cached = CachedKeys(keys, max_entries=2, clock=Hands())
    first, second, third = (keys.create("acme").token for _ in range(3))
    for token in (first, second):
        cached.check(token)
    assert cached.known(first) is not UNKNOWN
    cached.check(third)
    assert [cached.known(token) is UNKNOWN for token in (first, second, third)] == [False, True, False]


def test_no_token_is_kept_in_memory() -> None:
    keys = ApiKeys(MemoryObjects())
    cached = CachedKeys(keys)
    made = keys.create("acme")
    cached.check(made.token)
    cached.check(made.token[:-1])
    parts = parse_token(made.token)
    assert parts is not None
    held = repr(vars(cached))
    assert made.token not in held
    assert _packed(parts.secret) not in held


def test_threads_that_ask_at_once_get_the_same_answer(tmp_path: Path) -> None:
    keys = ApiKeys(LocalObjects(tmp_path))
    cached = CachedKeys(keys, max_entries=3)
    tokens = [keys.create("acme").token for _ in range(6)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(cached.check, tokens * 40))
    assert {asker.key_id for asker in found if isinstance(asker, ApiCaller)} == {
        parts.key_id for token in tokens if (parts := parse_token(token))
    }
    assert all(isinstance(asker, ApiCaller) for asker in found)


def test_keys_work_on_s3(moto_server: S3Server, s3_env: None) -> None:
    with closing(S3Objects(moto_server.bucket, secrets.token_hex(8), endpoint_url=moto_server.url)) as objects:
        keys = ApiKeys(objects)
        one, other = keys.create("größe/7", "read"), keys.create("größe/7", note="second")
        assert keys.check(one.token) == ApiCaller("größe/7", one.key_id, Role.READ.scopes, one.key_id)
        assert keys.revoke("größe/7", one.key_id)
        assert not keys.revoke("größe/7", one.key_id)
        assert keys.check(one.token) is None
        assert keys.check(other.token) is not None
        assert {key.key_id: key.state(0) for key in keys.list("größe/7")} == {
            one.key_id: "revoked",
            other.key_id: "live",
        }
