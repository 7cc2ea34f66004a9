"""Documents under a prefix of an S3 bucket, read through boto3 (`pip install "ragfence[s3]"`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from os.path import splitext
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import normalize
from urllib.parse import parse_qs

from ragfence._extras import needs_extra
from ragfence.core.document import Document
from ragfence.core.urls import show_url
from ragfence.documents.readers.content import LIMIT_BYTES, MAX_EXTENSION, SkippedFiles, content_reader
from ragfence.documents.sources.folder import check_patterns
from ragfence.documents.sources.ignore_rules import IGNORED, Ignore
from ragfence.documents.sources.source import Item
from ragfence.errors import DocumentInvalid, RagfenceError, StoreAuth, UnknownStore
from ragfence.stores.object_address import check_endpoint

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_BODY_READS = 3


class _RefusedError(Exception):
    """The server refused this object: its permissions, its KMS key, or its storage class."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.hint = "these credentials need s3:GetObject on it (and its KMS key), and it must not be archived"


class S3Place(NamedTuple):
    bucket: str
    prefix: str
    endpoint_url: str | None = None
    region: str | None = None


def parse_url(url: str) -> S3Place:
    """`s3://bucket/prefix`, with `?endpoint_url=...&region=...` as for the object store.

    >>> parsed("s3://docs/manuals/?region=eu-west-1")
    S3Place(bucket='docs', prefix='manuals', endpoint_url=None, region='eu-west-1')
    """
    path, _, parameters = url.removeprefix("s3://").partition("?")
    bucket, _, prefix = path.partition("/")
    if "@" in bucket or ":" in bucket:
        raise UnknownStore(
            "the URL of a bucket must not hold credentials: it appears in messages",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
        )
    if not url.startswith("s3://") or not bucket:
        raise UnknownStore(f"{show_url(url)!r} names no bucket", hint="use s3://bucket/prefix")
    query = {name: values[-1] for name, values in parse_qs(parameters, keep_blank_values=True).items()}
    unknown = set(query) - {"endpoint_url", "region"}
    if unknown:
        raise UnknownStore(f"s3://{path}: unknown {', '.join(sorted(unknown))}", hint="known: endpoint_url, region")
    return S3Place(bucket, prefix.strip("/"), query.get("endpoint_url") or None, query.get("region") or None)


class S3Source:
    """Every text, Markdown and HTML object below `prefix`, in the order in which the server lists them.

    The prefix is a folder, as it is to `aws s3 sync`: `manuals` does not mean `manuals-old/a.md`. A document's doc_id
    is its key below the prefix. `extensions`, `ignore` and `encoding` are those of `FolderSource`.

    The state of an item is the ETag and size it was listed with. If the object is overwritten before it is loaded, the
    document is the newer one under the older state: the next listing shows another state, and it is read again. (An
    object that by then is back at the very content it was listed with would be missed.)
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        client: S3Client | None = None,
        name: str | None = None,
        extensions: Mapping[str, str] | Iterable[str] | None = None,
        ignore: Iterable[str] = (),
        encoding: str = "utf-8",
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        check_endpoint(endpoint_url)
        prefix = prefix.strip("/")
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._name = name or f"s3://{bucket}/{prefix}".rstrip("/")
        self._endpoint_url, self._region = endpoint_url, region
        self._given = client
        self._made: tuple[int, S3Client] | None = None
        self._reader = content_reader(extensions, encoding, limit_bytes)
        self._ignore = Ignore([*IGNORED, *check_patterns(ignore)])
        self._skipped = SkippedFiles()

    @property
    def name(self) -> str:
        return self._name

    @property
    def skipped(self) -> SkippedFiles:
        """The objects that the last listing skipped."""
        return self._skipped

    def items(self) -> Iterator[Item]:
        self._skipped = SkippedFiles()
        client = self._client()
        from ragfence.stores.s3_errors import BotoError

        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._root)
        try:
            for page in pages:
                for entry in page.get("Contents", []):
                    key, size = entry["Key"], entry["Size"]
                    path = self.doc_id(key)
                    if path is None or self._ignore.skips_inside(path):
                        continue
                    if not self._reader.takes(path):
                        self._skipped.add_file(path)
                    else:
                        etag = entry.get("ETag", "").strip('"')
                        state = f"{etag}:{size}{self._reader.manner(path)}" if etag else ""
                        yield Item(path, state, partial(self._load, key, path, size))
        except BotoError as error:
            raise self._translate(error, "list the documents") from error

    def close(self) -> None:
        """Closes the connections this source made. A later use opens new ones."""
        made, self._made = self._made, None
        if made is not None:
            made[1].close()

    def doc_id(self, key: str) -> str | None:
        """Returns the doc_id of an object; None if it is not below the prefix, or stands for a folder."""
        path = normalize("NFC", key[len(self._root) :])
        return path if key.startswith(self._root) and path and not path.endswith("/") else None

    def skip_reason(self, doc_id: str) -> str:
        """Why a listing leaves the object out; empty if it does not."""
        if self._ignore.skips_inside(doc_id):
            return "ignored by a pattern"
        if not self._reader.takes(doc_id):
            return f"no reader for {splitext(doc_id)[1].lower()[:MAX_EXTENSION] or 'a name without extension'}"
        return ""

    def load(self, key: str, doc_id: str) -> Document | None:
        """Reads an object as it is now; None if it does not exist.

        Raises:
            DocumentInvalid: Its content is too large, or is not text.
            StoreAuth: These credentials may not read it, or it is archived.
        """
        try:
            data = self._fetch(key, doc_id)
        except _RefusedError as refused:
            hint = f"{refused.hint}; without s3:ListBucket a missing object looks the same"
            raise StoreAuth(str(refused), hint=hint) from refused
        if data is None:
            return None
        return self._reader.document(data, doc_id, source=self._name, source_url=f"s3://{self._bucket}/{key}")

    def _load(self, key: str, doc_id: str, size: int) -> Document:
        self._reader.refuse_size(size, doc_id, self._name)
        data = self._read(key, doc_id)
        return self._reader.document(data, doc_id, source=self._name, source_url=f"s3://{self._bucket}/{key}")

    def _read(self, key: str, doc_id: str) -> bytes:
        try:
            data = self._fetch(key, doc_id)
        except _RefusedError as refused:
            raise DocumentInvalid(str(refused), hint=refused.hint, doc_id=doc_id) from refused.__cause__
        if data is None:
            raise DocumentInvalid(
                f"{doc_id} ({self._name}) was removed before it was read", hint="run it again", doc_id=doc_id
            )
        return data

    def _fetch(self, key: str, doc_id: str) -> bytes | None:
        """Returns the content of an object; None if it does not exist."""
        client = self._client()
        from botocore.exceptions import ClientError

        from ragfence.stores.s3_errors import BotoError, is_absent

        for reads_left in reversed(range(_BODY_READS)):
            try:
                answer = client.get_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if is_absent(error):
                    return None
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                if status not in (400, 403):
                    raise self._translate(error, f"read {doc_id}") from error
                # The listing was allowed, so the error concerns this object: its permissions, KMS key or storage class.
                code = error.response.get("Error", {}).get("Code", "")
                raise _RefusedError(f"{doc_id} ({self._name}) cannot be read: {code} ({status})") from error
            except BotoError as error:
                raise self._translate(error, f"read {doc_id}") from error
            try:
                with contextlib.closing(answer["Body"]) as body:
                    # It may have grown since it was listed.
                    self._reader.refuse_size(answer["ContentLength"], doc_id, self._name)
                    return body.read()
            except BotoError as error:  # interrupted in the body, which the SDK does not retry
                if not reads_left:
                    raise self._translate(error, f"read {doc_id}") from error
        raise AssertionError("unreachable")

    def _client(self) -> S3Client:
        if self._given is not None:
            return self._given
        made = self._made
        if made is None or made[0] != os.getpid():  # connections must not be shared with a forked child
            made = self._made = os.getpid(), self._connected()
        return made[1]

    def _connected(self) -> S3Client:
        with needs_extra("s3", f"Reading {self._name}", UnknownStore):
            from boto3.session import Session
            from botocore.config import Config
        from ragfence.stores.s3_errors import BotoError

        config = Config(
            connect_timeout=5.0,
            read_timeout=30.0,
            max_pool_connections=32,
            retries={"mode": "standard", "total_max_attempts": 3},
            # As in the object store: only AWS reliably resolves the name of a bucket as a host.
            s3={"addressing_style": "path" if self._endpoint_url else "auto"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            return Session().client("s3", endpoint_url=self._endpoint_url, region_name=self._region, config=config)
        except BotoError as error:
            raise self._translate(error, "connect") from error
        except ValueError as error:  # botocore's error for an invalid endpoint URL
            raise UnknownStore(f"cannot open {self._name}: {error}", hint="check the endpoint's URL") from error

    def _translate(self, error: Exception, what: str) -> RagfenceError:
        from ragfence.stores.s3_errors import brief, translate

        translated = translate(error, what, self._bucket, self._name)
        if isinstance(translated, StoreAuth) and brief(error).startswith("AccessDenied"):
            # A source only reads; it needs no more permissions.
            return StoreAuth(
                translated.message, hint="these credentials need s3:ListBucket and s3:GetObject on the bucket"
            )
        return translated
