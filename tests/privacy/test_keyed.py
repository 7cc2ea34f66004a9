"""With `content_hash: hmac` nothing that is stored lets anybody who guesses a text find out that they guessed right."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
import xxhash

import ragfence
from ragfence import Document, Operation, Policy
from ragfence.client.retry import content_key
from ragfence.core.canonical import canonical_json
from ragfence.core.hashing import Algorithm, content_hash
from ragfence.core.settings import CONTENT_SECRET
from ragfence.documents.claims import Recipes
from ragfence.documents.identity import Content, Identity, snippet_ids
from ragfence.documents.sources import Item
from ragfence.engine.requests import fingerprint_of
from ragfence.server.routes.documents import _compared
from ragfence.wire.messages import Call
from tests import servers
from tests.indexes.building import CountingEmbedder, spec_in
from tests.server.processes import served

SECRET = "c0ffee" * 12
TEXT = "Her salary is 71250 a year."
LONG = "Her salary is 71250 a year, and it was 60000 before.\n\nHer bonus is 9000 a year, paid in March."
METADATA = {"diagnosis": "asthma"}
URL = "https://example.org/people/ada"
BATCH = json.dumps({"doc_id": "batch", "text": TEXT}) + "\n"
TOLD = "She called in sick on Monday."
RUN = {"doc_id": "run", "text": TEXT}
RUN_KEY = content_key("monday", 0, "POST", "/v1/documents", json.dumps(RUN).encode())
PAYLOAD = {"message": TOLD}
"""kept as it is for a diff, until it expires; its fingerprint in the rows stays for much longer"""
CHUNKS: dict[str, Any] = {"documents": {"chunk_size": 60}, "on_conflict": {"include_diff": True}}
HASHES: dict[str, Callable[[bytes], bytes]] = {
    **{name: lambda data, name=name: hashlib.new(name, data).digest() for name in ("md5", "sha1", "sha256", "sha512")},
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
    "blake2b, 32 bytes": lambda data: hashlib.blake2b(data, digest_size=32).digest(),
    "blake2s": lambda data: hashlib.blake2s(data).digest(),
    "xxh3_64": xxhash.xxh3_64_digest,
    "xxh3_128": xxhash.xxh3_128_digest,
    "xxh64": xxhash.xxh64_digest,
}


class Listed:
    """A source whose states are MD5s of the contents, as the ETags of S3 are."""

    name = "listed"

    def items(self) -> Iterator[Item]:
        yield Item("listed", hashlib.md5(TEXT.encode()).hexdigest(), lambda: Document("listed", TEXT))


def guessed(policy: Policy, tenant: str) -> Iterator[tuple[str, bytes]]:
    """All that somebody who guesses the text and knows ragfence can compute without the secret."""
    pieces = [TEXT, TOLD, LONG, *LONG.split("\n\n"), BATCH, URL, METADATA["diagnosis"]]
    for data in [*(piece.encode() for piece in pieces), canonical_json(METADATA), canonical_json(PAYLOAD)]:
        for name, made in HASHES.items():
            yield f"{name} of {data.decode()[:40]!r}", made(data)
    for data in [canonical_json(METADATA["diagnosis"])]:
        yield "digest of a metadata value", hashlib.sha256(data).digest()
    cut = Recipes(None, policy.documents).of("")
    documents = {"a": TEXT, "long": LONG, "http": TEXT, "run": TEXT, "batch": TEXT, "listed": TEXT}
    algorithms: tuple[Algorithm, ...] = ("xxh3", "sha256")
    for doc_id, text in documents.items():
        for algorithm in algorithms:
            identity, name = Identity(tenant, algorithm), doc_id.encode()  # type: ignore[assignment]
            content = Content(content_hash(text.encode(), algorithm), len(text.encode()))
            yield "key", identity.key(identity.place(name).shard, name, content.hash, cut.key_tail)[1:]
            yield "fingerprint", identity.fingerprint(content)
            yield "metadata hash", identity.metadata_hash(canonical_json(METADATA), URL, "")
            yield "metadata hash", identity.metadata_hash(canonical_json(METADATA), URL, "text/plain")
        for piece in [text, *text.split("\n\n")]:
            yield "snippet id", snippet_ids(doc_id, cut.recipe.digest, [piece])[0]
    yield "fingerprint of a payload", fingerprint_of(PAYLOAD)[0]
    yield "fingerprint of bytes", fingerprint_of(TOLD.encode())[0]
    sent = Document("http", TEXT, metadata=METADATA, source_url=URL)
    call = Call("POST", "/v1/documents", "/v1/documents", compared=_compared(sent, None))
    yield "fingerprint of a request", fingerprint_of(call.payload())[0]
    yield "key of a run", bytes.fromhex(RUN_KEY)
    yield "source of a run's key", bytes.fromhex(Operation(kind="http", source_type="p", source_id=RUN_KEY).source)
    batch = {"body": hashlib.sha256(BATCH.encode()).hexdigest()}
    call = Call("POST", "/v1/documents:batch", "/v1/documents:batch", compared=batch)
    yield "fingerprint of a batch", fingerprint_of(call.payload())[0]


EXPECTED_IF_PLAIN = {
    f"sha256 of {TEXT!r}",
    f"sha256 of {BATCH[:40]!r}",
    f"md5 of {TEXT!r}",
    f"sha256 of {URL!r}",
    "digest of a metadata value",
    "key",
    "fingerprint",
    "metadata hash",
    "snippet id",
    "fingerprint of a payload",
    "fingerprint of bytes",
    "fingerprint of a request",
    "fingerprint of a batch",
    "key of a run",
    "source of a run's key",
}
"""what the same work leaves behind without a key: the search below would find it"""


def found_in(held: bytes, policy: Policy, tenant: str) -> set[str]:
    found = set()
    for name, raw in guessed(policy, tenant):
        spelled = (raw, raw.hex().encode(), raw.hex()[:24].encode(), base64.b64encode(raw).rstrip(b"="))
        if any(each in held for each in spelled):
            found.add(name)
    return found


@contextmanager
def world(kind: str, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any, Callable[[], bytes]]]:
    with TemporaryDirectory() as folder:
        place = Path(folder)
        if kind == "embedded":
            yield place, place / "fence", lambda: in_files(place)
            return
        server: servers.RedisServer = request.getfixturevalue("valkey_server")
        client = redis.Redis.from_url(server.url)
        client.flushall()
        try:
            yield place, server.url, lambda: in_files(place) + b"\n" + in_server(client)
        finally:
            client.close()


def in_files(place: Path) -> bytes:
    pieces = []
    for file in sorted(place.rglob("*")):
        pieces.append(str(file.relative_to(place)).encode())
        if file.is_file():
            data = file.read_bytes()
            pieces.append(data)
            if data[:4] == b"PAR1":  # its pages are compressed
                pieces += values_in(pq.read_table(file).to_pylist())
    return b"\n".join(pieces)


def values_in(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for each in value.values():
            yield from values_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from values_in(each)
    else:
        yield value if isinstance(value, bytes) else str(value).encode()


def in_server(client: Any) -> bytes:
    pieces: list[bytes] = []
    for name in client.scan_iter(count=1000):
        pieces.append(name)
        match client.type(name):
            case b"string":
                pieces.append(client.get(name))
            case b"stream":
                pieces += [value for _, fields in client.xrange(name) for pair in fields.items() for value in pair]
            case b"hash":
                pieces += [value for pair in client.hgetall(name).items() for value in pair]
            case b"zset":
                pieces += client.zrange(name, 0, -1)
            case other:
                raise AssertionError(f"a key of type {other!r}: read it here")
    return b"\n".join(pieces)


def work(place: Path, store: Any, policy: dict[str, Any]) -> None:
    """Everything that leaves a digest of a content behind."""
    rules = Policy.from_mapping(policy)
    with ragfence.open(store, objects=place / "objects", tenant="acme", policy=rules) as fence:
        described = {"metadata": METADATA, "source_url": URL}
        fence.documents.ingest(Document("a", TEXT, **described))
        fence.documents.ingest(Document("a", TEXT, **described))
        fence.documents.ingest_many([Document("long", LONG)])
        fence.documents.sync(Listed(), table=True)
        assert fence.documents.sync(Listed(), table=True).unread == 1
        for payload in (PAYLOAD, TOLD.encode()):
            operation = Operation(kind="ticket", source_id=f"t-{type(payload).__name__}")
            with fence.claim(operation, payload=payload) as op:
                op.seal(effect_id="1")
            with fence.claim(operation, payload=payload) as op:
                assert not op.is_new
        build = fence.indexes.build(spec_in(place / "index", CountingEmbedder()))
        fence.aliases.swap("docs", build.index_hash)
        assert fence.search("docs", TEXT, k=1)[0].text
    with served(place, store, **policy) as api:
        caller = api.caller(principal="p")
        body = {"doc_id": "http", "text": TEXT, "metadata": METADATA, "source_url": URL}
        for status in (201, 201):
            assert caller.post("/v1/documents", body, key="one").status_code == status
        conflict = caller.post("/v1/documents", body | {"text": LONG}, key="one")
        assert conflict.status_code == 409
        for _ in range(2):
            assert caller.post("/v1/documents", RUN, key=RUN_KEY).status_code == 201
        asked = {"key": RUN_KEY, "method": "POST", "route": "/v1/documents"}
        assert caller.get("/v1/idempotency", params=asked).status_code == 201
        headers = {"Content-Type": "application/x-ndjson"}
        for _ in range(2):
            sent = caller.ask("POST", "/v1/documents:batch", "batch", content=BATCH, headers=headers)
            assert sent.status_code == 200, sent.text
        assert caller.get("/v1/documents/a").json()["content_hash"].startswith(rules.content_hash + ":")


@pytest.mark.parametrize("kind", ["embedded", "valkey"])
@pytest.mark.parametrize("drained", [False, True])
def test_who_guesses_a_text_finds_nothing_that_tells(
    kind: str, drained: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTENT_SECRET, SECRET)
    policy = {"content_hash": "hmac", **CHUNKS}
    rules = Policy.from_mapping(policy)
    with world(kind, request) as (place, store, stored):
        work(place, store, policy)
        with ragfence.open(store, objects=place / "objects", tenant="acme", policy=rules) as fence:
            if drained:
                fence.audit.drain()
            assert fence.documents.verify().ok
            assert fence.audit.check().ok, fence.audit.check().findings
        held = stored()
        assert found_in(held, rules, "acme") == set()
        assert SECRET.encode() not in held
        with ragfence.open(store, objects=place / "objects", tenant="acme", policy=rules) as fence:
            for doc_id in ("a", "long", "http", "run", "batch", "listed"):
                assert fence.documents.purge(doc_id).known
            assert fence.audit.check().ok, fence.audit.check().findings
        held = stored()
        assert TEXT.encode() not in held
        assert found_in(held, rules, "acme") == set()


@pytest.mark.parametrize("kind", ["embedded", "valkey"])
def test_the_same_search_finds_every_plain_digest(kind: str, request: pytest.FixtureRequest) -> None:
    policy = {"content_hash": "sha256", **CHUNKS}
    with world(kind, request) as (place, store, stored):
        work(place, store, policy)
        found = found_in(stored(), Policy.from_mapping(policy), "acme")
        assert found >= EXPECTED_IF_PLAIN, EXPECTED_IF_PLAIN - found
