"""Keys, digests and stored bytes, held still.

Never regenerate `golden/keys.json` to make these tests pass. An upgrade that changes a key makes every operation new
again: it performs the effects of all users a second time. One that changes stored bytes cannot read, or misreads, what
is in their stores. A new digest gets a new domain (`ragfence/operation/2`), a new format a new version, and both get
new vectors next to the old ones.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

import ragfence
from ragfence import Document
from ragfence.core.decision_rows import Row, context_of, decode_rows
from ragfence.core.hashing import ContentKey, content_hash, digest, digest_part, shard_of
from ragfence.core.key_strategies import KeyStrategy
from ragfence.core.layout import HEALED, TAKEOVER, TOKEN_BYTES, RowKind, State, mark_of_source
from ragfence.core.operations import FenceNumber, Operation, encoded, key_from_text, key_to_text
from ragfence.core.policy import Policy
from ragfence.core.receipts import default_effect_id
from ragfence.core.records import (
    Head,
    KeyRecord,
    SourceLease,
    SourceRecord,
    decode_record,
    head_of_source,
    park,
    unpark,
)
from ragfence.documents.identity import Content, Identity, snippet_ids
from ragfence.engine.commits import Commit, Commits
from ragfence.engine.content_hash import ContentHash
from ragfence.engine.epochs import Epochs
from ragfence.engine.notes import EffectNote, EffectNotes
from ragfence.engine.requests import Request, fingerprint_of
from ragfence.engine.results import Results
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.indexes.build_log import BuildEntry
from ragfence.indexes.snapshots import Snapshots
from ragfence.indexes.spec import compute_index_hash
from ragfence.server.replay import stored_key
from ragfence.stores.object_log import Numbered
from ragfence.stores.redis.codec import Names
from ragfence.testing.memory import MemoryFences, MemoryObjects

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "keys.json").read_text(encoding="utf-8"))
DOMAIN = re.compile(r"ragfence/[a-z/-]+/[0-9]+")
POLICY = Policy()

SEALED = KeyRecord(
    state=State.SEALED,
    fingerprint=bytes(range(16)),
    token=bytes(range(16, 28)),
    fence=FenceNumber(2**40 + 3, 2**33 + 5),
    attempt=2,
    first_seen_ms=1_700_000_000_001,
    when_ms=1_700_000_000_999,
    kind="ticket",
    effect_id="ef_é",
    payload=b'{"a":1}',
    result=b'j{"id":7}',
)
HELD = KeyRecord(
    State.HELD, b"f" * 16, b"t" * TOKEN_BYTES, FenceNumber(1, 1), 1, 1_700_000_000_000, 1_700_000_030_000, "é", "host:1"
)
FAILED = KeyRecord(
    State.FAILED, b"f" * 16, b"t" * TOKEN_BYTES, FenceNumber(1, 2), 65_535, 0, 0, error="CARD.declined", result=b"f{}"
)
HEAD = Head(bytes(range(32)), True, -(2**63), b"m" * 16, SEALED)
GONE = Head(b"d" * 32, False, None)
RECORDS = {
    "sealed": SEALED,
    "held": HELD,
    "failed": FAILED,
    "released": KeyRecord(State.RELEASED, b"f" * 16, b"t" * TOKEN_BYTES, FenceNumber(1, 3), 3, 1, 2, error="TIMEOUT"),
    "quarantined": KeyRecord(State.QUARANTINED, b"f" * 16, b"t" * TOKEN_BYTES, FenceNumber(1, 4), 5, 1, 2),
    "locked": KeyRecord(
        State.LOCKED,
        bytes(16),
        b"t" * TOKEN_BYTES,
        FenceNumber(3, 7),
        1,
        1_700_000_000_000,
        1_700_000_030_000,
        "lock",
        "é:1",
    ),
}
SOURCES = {
    "empty": SourceRecord(1),
    "head": SourceRecord(2**40, HEAD),
    "retracted, with a lease": SourceRecord(7, GONE, SourceLease(b"l" * 32, HELD)),
    "unsettled": SourceRecord(7, Head(b"d" * 32, True, 2**63 - 1), SourceLease(b"l" * 32, HELD, unsettled=True)),
}
ROWS = {
    "new": Row(b"t" * TOKEN_BYTES, 3, 1_700_000_000_000, RowKind.NEW, b"\x07" + b"k" * 32, b"f" * 16, context=b"{}"),
    "full": Row(
        token=bytes(range(12)),
        position=250,
        ts_ms=2**42 + 1,
        kind=RowKind.DUPLICATE,
        key=b"\x3f" + bytes(range(32)),
        fingerprint=bytes(range(16, 32)),
        flags=TAKEOVER | HEALED,
        attempt=513,
        fence=FenceNumber(2**50, 2**39 + 1),
        first_seen_ms=2**41,
        sealed_at_ms=2**41 + 2,
        expires_ms=2**41 + 3,
        waited_ms=70_000,
        winner=b"w" * TOKEN_BYTES,
        effect_id="ef_1",
        error_code="LEASE.fenced_out",
        context='{"kind":"é"}'.encode(),
    ),
}
COMMIT = Commit(
    key="07" + "ab" * 32,
    fingerprint="cd" * 16,
    token="ef" * 16,
    fence="3.41",
    attempt=2,
    first_seen_ms=1_700_000_000_001,
    sealed_at_ms=1_700_000_000_999,
    sequence=-5,
    failed=False,
    error="",
    effect_id="ef_1",
    result=b"j1",
)
NOTE = EffectNote(key="07" + "ab" * 32, token="ef" * 12, fence="3.41", attempt=2, at_ms=1_700_000_000_999)
NAMED = Operation(tenant="acme/ü", kind="web.hook", source_type="crm", source_id="evt~1", sequence=3)


def _domains_in_the_code() -> set[str]:
    found = set()
    for file in Path(ragfence.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOMAIN.fullmatch(node.value):
                found.add(node.value)
    return found


def test_every_digest_domain_has_a_vector() -> None:
    assert _domains_in_the_code() == {vector["domain"] for vector in GOLDEN["digests"]}


@pytest.mark.parametrize("vector", GOLDEN["digests"], ids=lambda vector: vector["domain"])
def test_digests_never_change(vector: dict[str, Any]) -> None:
    assert digest(vector["domain"], *map(bytes.fromhex, vector["parts"])).hex() == vector["digest"]


def test_shards_never_change() -> None:
    assert [[tenant, source, shard_of(tenant, source)] for tenant, source, _ in GOLDEN["shards"]] == GOLDEN["shards"]


@pytest.mark.parametrize("vector", GOLDEN["content_hashes"], ids=lambda vector: vector["data"][:16] or "empty")
def test_content_hashes_never_change(vector: dict[str, str]) -> None:
    data = bytes.fromhex(vector["data"])
    assert content_hash(data) == content_hash(data, "xxh3") == vector["xxh3"]
    assert content_hash(data, "sha256") == vector["sha256"]


@pytest.mark.parametrize("vector", GOLDEN["operations"], ids=lambda vector: str(vector["operation"])[:60])
def test_keys_of_operations_never_change(vector: dict[str, Any]) -> None:
    operation = Operation(**vector["operation"])
    assert key_to_text(operation.key) == vector["key"]
    assert key_from_text(vector["key"]) == operation.key
    assert operation.source == vector["source"]
    assert default_effect_id(operation.key) == vector["effect_id"]
    request = Request.of(operation, b"f" * 16, POLICY.for_kind(operation.kind))
    assert request.source.hex() == vector["slot"]
    assert context_of(operation).decode() == vector["context"]


def test_two_spellings_of_one_text_are_one_operation() -> None:
    twins = [vector for vector in GOLDEN["operations"] if vector["operation"]["kind"] == "twins"]
    assert len({json.dumps(vector["operation"]) for vector in twins}) == len(twins) == 2
    assert len({(vector["key"], vector["source"]) for vector in twins}) == 1


@pytest.mark.parametrize("vector", GOLDEN["payloads"], ids=lambda vector: str(vector)[:60])
def test_fingerprints_never_change(vector: dict[str, Any]) -> None:
    payload = bytes.fromhex(vector["bytes"]) if "bytes" in vector else vector["json"]
    fingerprint, text = fingerprint_of(payload)
    assert fingerprint.hex() == vector["fingerprint"]
    assert text.decode() == vector["canonical"]


def test_keyed_digests_never_change() -> None:
    vector = GOLDEN["keyed"]
    secret, tenant, text = vector["secret"].encode(), vector["tenant"], vector["text"].encode()
    key = ContentKey(secret, tenant)
    identity = Identity(tenant, "hmac", key)
    content = identity.content(text)
    assert content == Content(vector["content_hash"], len(text))
    assert content_hash(text, "hmac", key) == vector["content_hash"]
    assert identity.fingerprint(content).hex() == vector["fingerprint"]
    described = (vector["metadata"].encode(), vector["source_url"], vector["content_type"])
    assert identity.metadata_hash(*described).hex() == vector["metadata_hash"]
    ids = snippet_ids(vector["doc_id"], bytes.fromhex(vector["recipe"]), vector["pieces"], key)
    assert [each.hex() for each in ids] == vector["snippet_ids"]
    alone = snippet_ids(vector["doc_id"], bytes.fromhex(vector["recipe"]), vector["pieces"][:1], key)
    assert [each.hex() for each in alone] == vector["snippet_ids"][:1]
    assert fingerprint_of(vector["payload"], key)[0].hex() == vector["payload_fingerprint"]
    assert fingerprint_of(text, key)[0].hex() == vector["bytes_fingerprint"]
    assert digest_part(text, key) == vector["http_part"]
    assert identity.state(vector["state"]) == vector["noted_state"]
    assert stored_key(vector["http_key"], key) == vector["stored_http_key"]
    assert stored_key("job-17", key) == "job-17"
    assert stored_key(vector["http_key"], None) == vector["http_key"]
    objects = MemoryObjects()
    ContentHash(tenant, objects, "hmac", lambda: secret).settle()
    assert objects.get(vector["settings_name"]) == vector["settings"].encode()


def test_settings_without_a_key_never_change() -> None:
    objects = MemoryObjects()
    ContentHash("acme", objects, "sha256").settle()
    assert objects.get("acme/documents/settings") == b'{"version": 1, "content_hash": "sha256"}'


def test_entries_of_a_changed_content_hash_never_change() -> None:
    objects = MemoryObjects()
    with ragfence.open(
        MemoryFences("acme"), objects=objects, tenant="acme", policy=Policy(content_hash="xxh3")
    ) as fence:
        fence.documents.ingest(Document("a", "red"))
    policy = Policy(content_hash="sha256", content_hash_also="xxh3")
    with ragfence.open(MemoryFences("acme"), objects=objects, tenant="acme", policy=policy) as fence:
        fence.documents.ingest(Document("a", "green"))
    both = '"known": ["xxh3", "sha256"], "written":'
    assert [objects.get(f"acme/documents/hashes/{n:06d}") for n in (1, 2)] == [
        b'{"version": 3, %b ["xxh3"], "after_epoch": 0}' % both.encode(),
        b'{"version": 3, %b ["xxh3", "sha256"], "after_epoch": 2}' % both.encode(),
    ]
    assert objects.get("acme/documents/settings") == b'{"version": 1, "content_hash": "xxh3"}'


@pytest.mark.parametrize("vector", GOLDEN["key_fields"], ids=lambda vector: str(vector["fields"]))
def test_keys_of_named_fields_never_change(vector: dict[str, Any]) -> None:
    source_id, _ = KeyStrategy(id=None, fields=tuple(vector["fields"]), name="")(vector["payload"])
    assert source_id == vector["source_id"]


@pytest.mark.parametrize("name", RECORDS)
def test_key_records_never_change(name: str) -> None:
    stored = bytes.fromhex(GOLDEN["records"][name])
    assert RECORDS[name].encode() == stored
    assert decode_record(stored) == RECORDS[name]


@pytest.mark.parametrize("name", SOURCES)
def test_source_records_never_change(name: str) -> None:
    stored = bytes.fromhex(GOLDEN["sources"][name])
    assert SOURCES[name].encode() == stored
    assert SourceRecord.decode(stored) == SOURCES[name]
    stamp = SOURCES[name].stamp.to_bytes(8, "big")
    assert head_of_source(stored, None) == head_of_source(stored, stamp) == SOURCES[name].head
    assert head_of_source(stored, b"another!") is head_of_source(stored, b"") is None
    head = SOURCES[name].head
    mark = head.digest + head.metadata_hash if head and head.live and head.record else None
    assert mark_of_source(stored, None) == mark_of_source(stored, stamp) == mark
    assert mark_of_source(stored, b"another!") is mark_of_source(stored, b"") is None
    if mark:
        with pytest.raises(FormatCorrupt, match="cut off"):
            mark_of_source(stored[:60], None)


def test_parked_records_never_change() -> None:
    stored = bytes.fromhex(GOLDEN["parked"])
    assert park(2**40 + 3, SEALED) == stored
    assert unpark(stored, 2**40 + 3) == SEALED


@pytest.mark.parametrize("name", ROWS)
def test_decision_rows_never_change(name: str) -> None:
    stored = bytes.fromhex(GOLDEN["rows"][name])
    assert ROWS[name].encode() == stored
    assert list(decode_rows(stored)) == [ROWS[name]]


def test_commits_never_change() -> None:
    assert COMMIT.encode().decode() == GOLDEN["commit"]
    assert Commit.decode("name", GOLDEN["commit"].encode()) == COMMIT


def test_notes_never_change() -> None:
    assert NOTE.encode().decode() == GOLDEN["note"]
    assert EffectNote.decode("name", GOLDEN["note"].encode()) == NOTE
    with pytest.raises(FormatTooNew):
        EffectNote.decode("name", GOLDEN["note"].replace('"version":1', '"version":2').encode())
    for broken in (b"", b"[]", b"{}", b'{"version":1}'):
        with pytest.raises(FormatCorrupt):
            EffectNote.decode("name", broken)


def test_names_in_the_object_store_never_change() -> None:
    objects = MemoryObjects()
    commits, epochs = Commits(NAMED.tenant, objects), Epochs(NAMED.tenant, objects)
    commits.put(NAMED, COMMIT)
    EffectNotes(NAMED.tenant, objects).put(NAMED, NOTE)
    commits.raise_sequence(NAMED, 4)
    commits.raise_sequence(NAMED, -(2**63))
    epochs.begin(12, "token")
    epochs.complete(12, [])
    objects.put_new(epochs.segment_name(12, "abc"), b"")
    Results(NAMED.tenant, POLICY, objects).store("x" * (POLICY.results.inline_max_bytes + 1), "key")
    assert [entry.name for entry in objects.list("")] == GOLDEN["object_names"]


def test_names_in_redis_never_change() -> None:
    names, key = Names("acme/ü"), b"\x2a" + b"k" * 32
    found = [names.markers[42], names.counters[42], names.rows[42], names.record(key), names.source(42, b"s" * 20)]
    assert [name.decode() for name in (*found, names.lock("hydration"))] == GOLDEN["redis_names"]


def test_parts_of_names_never_change() -> None:
    assert {text: encoded(text) for text in GOLDEN["encoded"]} == GOLDEN["encoded"]


BUILDS = json.loads((Path(__file__).parents[1] / "golden" / "builds.json").read_text(encoding="utf-8"))
INPUTS = ("tenant", "corpus", "embedder", "backend", "metric", "index", "parameters", "analyzer", "schema")


@pytest.mark.parametrize("name", BUILDS["entries"])
def test_entries_of_builds_never_change(name: str) -> None:
    """`exact` and `approximate` were sealed before recall was measured, `measured` since."""
    stored = BUILDS["entries"][name]
    entry = BuildEntry.decode(name, Numbered(3, stored.encode()))
    assert entry.encode().decode() == stored
    assert entry.seal is not None
    assert compute_index_hash({each: entry.seal.inputs[each] for each in INPUTS}) == BUILDS["index_hashes"][name]
    assert entry.seal.checks.get("recall") == (0.9812 if name == "measured" else None)


def test_the_counts_of_a_corpus_never_change() -> None:
    objects = MemoryObjects()
    name, stored = BUILDS["corpus_rows"]
    objects.put_new(name, stored.encode())
    corpora = Snapshots("acme/ü", objects, cast("Any", None))  # what is stored is not counted again
    assert corpora.rows("sha256:" + name.rpartition("/")[2]) == 38_595
