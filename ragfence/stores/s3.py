"""Objects on S3 and its compatibles, through boto3.

The one write is a single PUT with `If-None-Match: *`: of all conditional writes the only one that is atomic
on every server worth using. Its plain 200 is final. After anything unclear (timeout, cut connection, 5xx,
409, 412) it is unknown whose write won, above all after a retry, which turns one's own success into a 412.
So every put carries a nonce as user metadata, and the truth is read back: our nonce means won, another's
means lost, nothing there means put again with the same nonce. Nothing is ever deleted because a state is
unknown, and an ETag is never taken for a content hash.

Listings in byte order, out of the pages of servers that may sort otherwise.

S3 sorts whole names. A server that keeps folders inside (SeaweedFS) sorts level by level: folder `a` with all
it holds, then `a-b`, although `a-b` < `a/`; and a StartAfter of `a` skips the folder `a`. `flat` takes the
server's word and needs a request per page; `walk` is right on both kinds and needs a request per folder.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import heapq
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode, urlsplit

from boto3.session import Session
from botocore.config import Config

from ragfence.core.urls import show_url
from ragfence.errors import CommitUncertain, RagfenceError, StoreUnavailable, StoreUnsafe, UnknownStore
from ragfence.stores.object_address import check_endpoint
from ragfence.stores.objects import ObjectEntry, Put, check_listing, check_name, is_name
from ragfence.stores.s3_errors import BotoError, brief, is_absent, leaves_open, never_sent, translate

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PAGE = 1000


@dataclass(frozen=True, slots=True)
class ListingPage:
    """`folders` are names without a trailing slash; a page has some only if it was asked for one level."""

    entries: list[ObjectEntry]
    folders: list[str]


class ListingPages(Protocol):
    def __call__(self, prefix: str, *, start_after: str, page_size: int, one_level: bool) -> Iterator[ListingPage]: ...


def flat(pages: ListingPages, prefix: str, start_after: str, limit: int | None) -> Iterator[ObjectEntry]:
    page_size = PAGE if limit is None else min(limit, PAGE)
    for page in pages(prefix, start_after=start_after, page_size=page_size, one_level=False):
        yield from page.entries


def walk(pages: ListingPages, prefix: str, start_after: str, limit: int | None) -> Iterator[ObjectEntry]:
    base = prefix[: prefix.rfind("/") + 1]
    if start_after > base and not start_after.startswith(base):
        return
    # A folder belongs where its contents do, at "a/": it is held back until a bare name above that comes by.
    held: list[str] = []
    page_size = PAGE if limit is None else min(limit + 16, PAGE)
    for page in pages(prefix, start_after=_before(base, start_after), page_size=page_size, one_level=True):
        level: list[tuple[str, ObjectEntry | None]] = [(entry.name, entry) for entry in page.entries]
        level += [(folder, None) for folder in page.folders]
        for name, entry in sorted(level, key=lambda pair: pair[0]):
            while held and held[0] < name:
                yield from _descend(pages, heapq.heappop(held), start_after, limit)
            if entry is None:
                heapq.heappush(held, f"{name}/")
            elif name > start_after:
                yield entry
    while held:
        yield from _descend(pages, heapq.heappop(held), start_after, limit)


def _descend(pages: ListingPages, folder: str, start_after: str, limit: int | None) -> Iterator[ObjectEntry]:
    if folder > start_after or start_after.startswith(folder):
        yield from walk(pages, folder, start_after, limit)


def _before(base: str, start_after: str) -> str:
    """A StartAfter for one level that skips nothing above `start_after`, whichever way the server sorts.

    Where bare names are sorted, folder `a` comes before `a-b`, though `a/x` is above it: so start below the
    first folder that could hold such a name. That also keeps the folder which `start_after` itself is in.
    """
    if not start_after.startswith(base):
        return ""  # it is below all of this level
    first = start_after[len(base) :].partition("/")[0]
    end = next((at for at in range(1, len(first)) if first[at] < "/"), len(first))
    return base + first[: end - 1] if end > 1 else ""


NONCE = "ragfence-nonce"
MAX_PREFIX_BYTES = 120
_BODY_READS = 3


@dataclass(frozen=True, slots=True)
class PutRetry:
    """How long `put_new` tries to learn the outcome; it backs off exponentially, with full jitter."""

    tries: int = 8
    budget_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0

    def pause_s(self, attempt: int) -> float:
        return random.uniform(0.0, min(self.cap_s, self.base_s * 2**attempt))


@dataclass(frozen=True, slots=True)
class _Clients:
    """Two, because a put must not be repeated behind our back, while reads may be."""

    pid: int
    writer: S3Client
    reader: S3Client


class S3Objects:
    """An `ObjectStore` in `bucket` under `prefix`; credentials come from where boto3 finds them.

    A given `client` is used for everything, with the retries and timeouts it has. With `probe=False` nothing
    is checked at open, and listings take the way that is right on every server: a request per folder.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        client: S3Client | None = None,
        probe: bool = True,
        put_retry: PutRetry | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        prefix = prefix.strip("/")
        if prefix:
            check_name(prefix)
        if not bucket or "@" in bucket or len(prefix) > MAX_PREFIX_BYTES:
            raise UnknownStore(
                f"cannot open {show_url(f's3://{bucket}/{prefix}')}",
                hint=f"name a bucket: s3://bucket/prefix, with a prefix of at most {MAX_PREFIX_BYTES} bytes",
            )
        check_endpoint(endpoint_url)
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._endpoint_url, self._region = endpoint_url, region
        self._connect_timeout_s, self._read_timeout_s = connect_timeout_s, read_timeout_s
        self._put_retry = put_retry or PutRetry()
        self._sleep = sleep
        self._given = client
        self._made: _Clients | None = None
        self._lists_in_byte_order = False
        if probe:
            try:
                self.probe()
            except BaseException:
                self.close()
                raise

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._root}".rstrip("/")

    @property
    def address(self) -> str | None:
        """The URL with endpoint and region, so that another process can open the store; None with a given client."""
        if self._given is not None:
            return None
        more = {"endpoint_url": self._endpoint_url, "region": self._region}
        query = urlencode({name: value for name, value in more.items() if value})
        return f"{self.url}?{query}" if query else self.url

    def get(self, name: str) -> bytes | None:
        check_name(name)
        found = self._read(name)
        return None if found is None else found[0]

    def put_new(self, name: str, data: bytes) -> Put:
        check_name(name)
        nonce = secrets.token_hex(16)
        deadline = time.monotonic() + self._put_retry.budget_s
        sent = False
        cause: Exception | None = None
        for attempt in range(self._put_retry.tries):
            if attempt:
                if time.monotonic() >= deadline:
                    break
                self._sleep(self._put_retry.pause_s(attempt))
            try:
                self._put(name, data, nonce)
                return Put(won=True)
            except BotoError as error:
                cause = error
                if self._given is None and never_sent(error):
                    continue
                if not leaves_open(error):
                    if sent:
                        break  # this one was refused, but an earlier one may have landed
                    raise self._translated(error, f"write {name}") from error
            sent = True
            try:
                found = self._read(name)
            except RagfenceError as error:
                cause = error
                if not error.retryable:
                    break
                continue
            if found is not None:
                existing, theirs = found
                return Put(won=True) if theirs == nonce else Put(won=False, existing=existing)
        if sent:
            raise CommitUncertain(f"cannot say whether {name} was written, {self._where}: {brief(cause)}") from cause
        raise StoreUnavailable(
            f"cannot write {name}, {self._where}: {brief(cause)}",
            hint="check that the server is running there and the endpoint is right; nothing was written",
        ) from cause

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectEntry]:
        check_listing(prefix, limit)
        if limit == 0:
            return iter(())
        way = flat if self._lists_in_byte_order else walk
        return islice(way(self._pages, prefix, start_after, limit), limit)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        for start in range(0, len(names), PAGE):
            self._delete(names[start : start + PAGE])

    def close(self) -> None:
        """Hangs up. A client that was given stays open, as do a parent's connections when a child calls this."""
        if self._made is not None and self._made.pid == os.getpid() and self._given is None:
            self._made.writer.close()
            self._made.reader.close()
        self._made = None

    def probe(self) -> None:
        """Refuses a server on which `put_new` would not be safe, and learns how it sorts its listings."""
        next(self._pages("", page_size=1), None)  # wrong bucket, key or endpoint: said at once, before any retry
        folder = f".probe/{secrets.token_hex(8)}"
        names = [f"{folder}/a-b", f"{folder}/a/b"]  # SeaweedFS lists folder by folder: a/b before a-b
        try:
            self.put_new(names[0], b"first")
            again = self.put_new(names[0], b"second")
            found = self._read(names[0])
            if again.won or again.existing != b"first" or found is None or found[0] != b"first":
                raise self._unsafe("this server ignores If-None-Match: a second put of the same name was accepted")
            if found[1] is None:
                raise self._unsafe("this server drops user metadata, so it is impossible to know whose put won")
            self.put_new(names[1], b"")
            listed = [entry.name for entry in flat(self._pages, f"{folder}/", "", None)]
            if sorted(listed) != names:
                raise self._unsafe("this server does not list what was just written")
            after = [entry.name for entry in flat(self._pages, f"{folder}/", f"{folder}/a", None)]
            self._lists_in_byte_order = listed == after == names
        finally:
            with contextlib.suppress(RagfenceError):  # leftovers under .probe/ do not make the store unusable
                self._delete(names)

    def _unsafe(self, what: str) -> StoreUnsafe:
        hint = "use AWS S3, or a server with conditional writes (MinIO, Ceph, SeaweedFS, R2)"
        return StoreUnsafe(f"{what} ({self._where})", hint=hint)

    def _put(self, name: str, data: bytes, nonce: str) -> None:
        self._clients.writer.put_object(
            Bucket=self._bucket,
            Key=self._root + name,
            Body=data,
            # SeaweedFS takes a request that is cut off before its body for an empty object, unless it can compare.
            ContentMD5=_md5(data),
            IfNoneMatch="*",
            Metadata={NONCE: nonce},
        )

    def _read(self, name: str) -> tuple[bytes, str | None] | None:
        """The object and the nonce it was put with."""
        for reads_left in reversed(range(_BODY_READS)):
            try:
                answer = self._clients.reader.get_object(Bucket=self._bucket, Key=self._root + name)
            except BotoError as error:
                if is_absent(error):
                    return None
                raise self._translated(error, f"read {name}") from error
            try:
                with contextlib.closing(answer["Body"]) as body:
                    return body.read(), answer["Metadata"].get(NONCE)
            except BotoError as error:  # cut off in the middle, which the SDK does not repeat
                if not reads_left:
                    raise self._translated(error, f"read {name}") from error
        raise AssertionError("unreachable")

    def _delete(self, names: Sequence[str]) -> None:
        objects: Any = [{"Key": self._root + name} for name in names]
        try:
            answer = self._clients.reader.delete_objects(
                Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
        except BotoError as error:
            raise self._translated(error, f"delete {len(names)} objects") from error
        failed = [error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"]
        if failed:
            raise StoreUnavailable(
                f"cannot delete {len(failed)} of {len(names)} objects, {self._where}: "
                f"{failed[0].get('Key')}: {failed[0].get('Code')}",
                hint="the credentials need s3:DeleteObject; deleting again is safe",
            )

    def _pages(
        self, prefix: str, *, start_after: str = "", page_size: int = PAGE, one_level: bool = False
    ) -> Iterator[ListingPage]:
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._root + prefix}
        if start_after:
            asked["StartAfter"] = self._root + start_after
        if one_level:
            asked["Delimiter"] = "/"
        paginator = self._clients.reader.get_paginator("list_objects_v2")
        try:
            for answer in paginator.paginate(**asked, PaginationConfig={"PageSize": page_size}):
                yield self._page(answer)
        except BotoError as error:
            raise self._translated(error, f"list {prefix}") from error

    def _page(self, answer: Any) -> ListingPage:
        cut = len(self._root)
        entries = [
            ObjectEntry(item["Key"][cut:], item["Size"], int(item["LastModified"].timestamp() * 1000))
            for item in answer.get("Contents", [])
            if is_name(item["Key"][cut:])  # not the "folder/" objects that consoles leave
        ]
        return ListingPage(entries, [item["Prefix"][cut:-1] for item in answer.get("CommonPrefixes", [])])

    @property
    def client(self) -> S3Client:
        """The endpoint, region and credentials that boto3 uses, for another client of the same place."""
        return self._clients.reader

    @property
    def _clients(self) -> _Clients:
        made = self._made
        if made is None or made.pid != os.getpid():  # connections must not be shared with a forked child
            made = self._made = self._connect()
        return made

    def _connect(self) -> _Clients:
        if self._given is not None:
            return _Clients(os.getpid(), self._given, self._given)
        try:
            session = Session()
            writer = self._client(session, attempts=1)
            reader = self._client(session, attempts=3)
        except BotoError as error:
            raise self._translated(error, "connect") from error
        except ValueError as error:  # botocore raises it for an endpoint that is not a URL
            raise UnknownStore(f"cannot open {self.url}: {error}", hint="check the endpoint's URL") from error
        reader.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        return _Clients(os.getpid(), writer, reader)

    def _client(self, session: Session, *, attempts: int) -> S3Client:
        config = Config(
            connect_timeout=self._connect_timeout_s,
            read_timeout=self._read_timeout_s,
            max_pool_connections=32,
            retries={"mode": "standard", "total_max_attempts": attempts},
            # Of the bucket's own name as a host only AWS can be relied on to know.
            s3={"addressing_style": "path" if self._endpoint_url else "auto"},
            # The checksums boto3 adds by default are refused or mangled by many compatibles.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return session.client("s3", endpoint_url=self._endpoint_url, region_name=self._region, config=config)

    def _translated(self, error: Exception, what: str) -> RagfenceError:
        return translate(error, what, self._bucket, self._where)

    @property
    def _where(self) -> str:
        """The store and its endpoint, without what else an endpoint's URL may hold."""
        if not self._endpoint_url:
            return self.url
        parts = urlsplit(self._endpoint_url)
        return f"{self.url} at {parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """A batch delete must carry a checksum, and older servers know only this one."""
    params["headers"]["Content-MD5"] = _md5(params["body"])


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
