"""Keys, places and ids of documents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragfence.core.hashing import Algorithm, content_hash, shard_of
from ragfence.documents.identity import Content, Identity, key_tail, operation_of, snippet_ids, snippet_texts
from ragfence.engine.requests import document_slot

IDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=60)


@given(IDS, IDS, st.binary(max_size=50), st.sampled_from(["xxh3", "sha256"]))
def test_a_documents_key_is_that_of_an_operation(tenant: str, doc_id: str, text: bytes, algorithm: Algorithm) -> None:
    """The digests are framed ahead for speed; they must stay those of `Operation`, which `explain` and `keys` use."""
    operation = operation_of(tenant, doc_id, content_hash(text, algorithm), "ab" * 32)
    identity = Identity(operation.tenant, algorithm)
    name = operation.source_id.encode()
    shard, source = identity.place(name)
    content = identity.content(text)
    assert content == Content(content_hash(text, algorithm), len(text))
    assert identity.key(shard, name, content.hash, key_tail("ab" * 32)) == operation.key
    told = identity.digests(name, content.hash, content.size, key_tail("ab" * 32), text, doc_id, tenant)
    described = identity.metadata_hash(text, doc_id, tenant)
    assert told == (operation.key, source, identity.fingerprint(content), described)
    assert shard == shard_of(operation.tenant, operation.source_id)
    assert source == document_slot(operation.tenant, operation.source_id)


@given(st.sampled_from(["xxh3", "sha256"]))
def test_nothing_that_is_compared_can_be_shifted_between_fields(algorithm: Algorithm) -> None:
    identity = Identity("t", algorithm)
    made = {identity.metadata_hash(*parts) for parts in [(b"ab", "c", ""), (b"a", "bc", ""), (b"a", "b", "c")]}
    assert len(made) == 3
    assert identity.fingerprint(Content("xxh3:1", 1)) != identity.fingerprint(Content("xxh3:1", 2))


def test_snippet_ids_depend_on_document_recipe_text_and_occurrence() -> None:
    ids = snippet_ids("a", b"r", ["x", "y", "x"])
    assert len(set(ids)) == 3
    assert snippet_ids("a", b"r", ["y", "x"]) == [ids[1], ids[0]]
    assert not set(ids) & set(snippet_ids("b", b"r", ["x", "y", "x"]))
    assert not set(ids) & set(snippet_ids("a", b"s", ["x", "y", "x"]))
    assert snippet_texts(b"".join(ids)) == tuple(each.hex() for each in ids)
    assert snippet_texts(b"") == ()
