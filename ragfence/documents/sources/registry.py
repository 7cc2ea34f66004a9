"""Makes the source for a path, a URL or an iterable that is passed to `sync` or to the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ragfence.core.document import Document
from ragfence.core.urls import show_url
from ragfence.documents.sources.folder import FileSource, FolderSource, printable
from ragfence.documents.sources.frameworks import DocumentsSource
from ragfence.documents.sources.jsonl import JsonlSource
from ragfence.documents.sources.s3 import S3Source, parse_url
from ragfence.documents.sources.source import Source
from ragfence.errors import ValidationError

KNOWN = (
    "known: a folder, a text, Markdown or HTML file, a .jsonl (or .jsonl.gz) file, s3://bucket/prefix, an iterable of "
    "documents (ragfence's, LangChain's or LlamaIndex's), or a source"
)

_JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def source_of(thing: object, *, name: str | None = None) -> Source:
    """Returns the source of a path, a URL or an iterable; a source is returned as it is. `name` names a new source.

    >>> source_of("s3://docs/manuals").name
    's3://docs/manuals'
    """
    if isinstance(thing, str) and _URL.match(thing):
        return _at_url(thing, name)
    if isinstance(thing, str | os.PathLike):
        return _at_path(thing, name)
    if isinstance(thing, Source):
        return thing
    if isinstance(thing, Document):
        raise ValidationError(
            "a document is not a source", hint="use fence.documents.ingest(document), or pass [document]"
        )
    if isinstance(thing, Iterable) and not isinstance(thing, bytes | bytearray | memoryview | Mapping):
        return DocumentsSource(thing, name=name)
    raise ValidationError(f"no documents can be read from {type(thing).__name__}", hint=KNOWN)


def _at_url(url: str, name: str | None) -> Source:
    if not url.startswith("s3://"):
        # Not the rest of the URL, which may hold a password.
        raise ValidationError(f"no documents can be read from {url.partition('://')[0]}:// URLs", hint=KNOWN)
    place = parse_url(url)
    return S3Source(place.bucket, place.prefix, endpoint_url=place.endpoint_url, region=place.region, name=name)


def _at_path(given: str | os.PathLike[str], name: str | None) -> Source:
    path = os.fspath(given)
    if not path:
        raise ValidationError(f"{path!r} is not a valid path", hint=KNOWN)
    if os.path.isdir(path):
        return FolderSource(path, name=name)
    if not os.path.exists(path):
        name = show_url(path) if "@" in path else printable(path)  # perhaps a URL that was mistyped
        raise ValidationError(f"{name!r} does not exist", hint=f"check the path; {KNOWN}")
    if Path(path).name.lower().endswith(_JSONL):
        return JsonlSource(path, name=name)
    return FileSource(path, name=name)
