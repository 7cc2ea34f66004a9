"""Digests. Every input is length-prefixed and carries a domain with its version.

Length prefixes make `("ab", "c")` and `("a", "bc")` different inputs; the domain keeps a digest made for one
purpose from ever being equal to one made for another. Golden vectors in the tests hold every domain still: a
changed digest would silently perform a user's effects again.
"""

from __future__ import annotations

import hmac
from functools import cache
from hashlib import sha256
from typing import Literal, NoReturn

import xxhash

SHARDS = 64
_SIZES = [size.to_bytes(8, "big") for size in range(256)]

Algorithm = Literal["xxh3", "sha256", "hmac"]


def framed(domain: str, parts: tuple[bytes, ...]) -> bytes:
    """The unambiguous byte string that stands for `parts` under `domain`."""
    if len(parts) > 8 and len(sizes := set(map(len, parts))) == 1:
        # Thousands of digests in a row: the same bytes, joined at once.
        prefix = sizes.pop().to_bytes(8, "big")
        return b"".join((_tag(domain), prefix, prefix.join(parts)))
    return b"".join((_tag(domain), *map(sized, parts)))


def sized(part: bytes) -> bytes:
    """One part of a framed byte string. Parts can be joined: the frame of some is the start of the frame of more."""
    size = len(part)
    return (_SIZES[size] if size < 256 else size.to_bytes(8, "big")) + part


@cache
def _tag(domain: str) -> bytes:
    tag = domain.encode()
    return len(tag).to_bytes(2, "big") + tag


def digest(domain: str, *parts: bytes) -> bytes:
    """32 bytes of sha256 over the framed parts. `domain` ends in its version: `ragfence/operation/1`."""
    if len(parts) == 1 and len(parts[0]) < 256:
        return sha256(_tag(domain) + _SIZES[len(parts[0])] + parts[0]).digest()
    return sha256(framed(domain, parts)).digest()


def shard_of(tenant: str, source_id: str) -> int:
    """Which of the 64 shards a source lives in: one notion for Redis slots, Dagster partitions and scans."""
    return shard_of_bytes(tenant.encode(), source_id.encode())


def shard_of_bytes(tenant: bytes, source_id: bytes) -> int:
    return shard_framed(framed("ragfence/shard/1", (tenant, source_id)))


def shard_framed(frame: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(frame)) % SHARDS


class ContentKey:
    """The key of a tenant whose digests of content are keyed, derived from a secret that no store holds.

    The tenant is part of it: two tenants with one secret still have nothing in common.
    """

    __slots__ = ("_key",)

    def __init__(self, secret: bytes, tenant: str) -> None:
        self._key = hmac.digest(secret, framed("ragfence/content-key/1", (tenant.encode(),)), "sha256")

    def digest(self, domain: str, *parts: bytes) -> bytes:
        """Like the function `digest`, but only with the secret: 32 bytes of HMAC-SHA256."""
        return hmac.digest(self._key, framed(domain, parts), "sha256")

    def digest_frame(self, frame: bytes) -> bytes:
        """Of parts that are framed already."""
        return hmac.digest(self._key, frame, "sha256")

    def __repr__(self) -> str:
        return "ContentKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a content key cannot be pickled: derive it from the secret where it is needed")


def digest_payload(domain: str, data: bytes, key: ContentKey | None) -> bytes:
    """What is stored to compare a payload by: keyed for a tenant that has a key."""
    return digest(domain, data) if key is None else key.digest(domain, data)


def digest_part(data: bytes, key: ContentKey | None) -> str:
    """A part of a request, as it is kept to tell what differs between two of them."""
    if key is None:
        return "sha256:" + sha256(data).hexdigest()
    return "hmac:" + key.digest("ragfence/http-part/1", data).hex()


def content_hash(data: bytes, algorithm: Algorithm = "xxh3", key: ContentKey | None = None) -> str:
    """An algorithm-tagged hash of content: `xxh3:...` for trusted pipelines, `sha256:...` against hostile senders.

    `hmac:...` takes a key: without it, a guessed text cannot be compared with the one that was hashed.
    """
    if algorithm == "hmac":
        assert key is not None
        return "hmac:" + key.digest("ragfence/content-hmac/1", data).hex()
    if algorithm == "sha256":
        return "sha256:" + sha256(data).hexdigest()
    return "xxh3:" + xxhash.xxh3_128_hexdigest(data)
