"""From the name of a backend to the backend, and where LanceDB lives when nobody says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ragfence.core.urls import HIDDEN, show_url
from ragfence.errors import UnknownStore, Unsupported
from ragfence.indexes.backends.backend import Backend
from ragfence.stores.local import LocalObjects

if TYPE_CHECKING:
    from ragfence.stores.objects import ObjectStore

FORMS = (
    "lance, lance:/path/to/folder, lance+s3://bucket/prefix, qdrant+http://host:6333 (or https), "
    "qdrant+file:///path/to/folder"
)
BESIDE = "lance"
BESIDE_ON_S3 = ".lance"
"""no tenant is encoded with a leading dot, so nothing that is listed is ever in there"""


def open_backend(spec: str, *, default_lance: str, storage_options: Mapping[str, str] | None = None) -> Backend:
    """The backend a spec names; `storage_options` are for LanceDB on S3."""
    kind, plus, rest = spec.partition("+")
    if not plus:
        kind, colon, rest = spec.partition(":")
        if kind == "lance" and not (colon and not rest):
            _refuse_relative(rest)
            return _lance(rest or default_lance, storage_options)
        raise _unknown(spec)
    _refuse_credentials(kind, rest)
    try:
        parts = urlsplit(rest)
    except ValueError:  # its words quote the URL
        parts = urlsplit("")
    if HIDDEN in show_url(rest):
        raise _unknown(spec)
    if kind == "lance" and parts.scheme == "s3" and parts.netloc and not parts.query:
        return _lance(rest, storage_options)
    if kind == "qdrant" and parts.scheme in ("http", "https") and parts.netloc and not parts.query:
        from ragfence.indexes.backends.qdrant import QdrantBackend

        return QdrantBackend(rest)
    if kind == "qdrant" and parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.strip("/"):
        from ragfence.indexes.backends.qdrant import QdrantBackend

        return QdrantBackend(path=Path(unquote(parts.path)))
    raise _unknown(spec)


def default_lance_location(objects: ObjectStore) -> tuple[str, dict[str, str]]:
    """Where LanceDB keeps the indexes of these objects by default, and the storage options to get there.

    In a folder: beside the tree of objects, inside the folder the user named. On S3: under the same prefix.
    """
    if isinstance(objects, LocalObjects):
        return str(_file_path(objects.url) / BESIDE), {}
    if objects.url.startswith("s3://"):
        from ragfence.stores.s3 import S3Objects

        if isinstance(objects, S3Objects):
            return f"{objects.url}/{BESIDE_ON_S3}", _s3_options(objects)
    raise Unsupported(
        f"nobody knows where LanceDB should keep indexes beside {objects.url}",
        hint=f"name the backend in the spec: {FORMS}",
    )


def _lance(uri: str, storage_options: Mapping[str, str] | None) -> Backend:
    from ragfence.indexes.backends.lance import LanceBackend

    return LanceBackend(uri, storage_options if uri.startswith("s3://") else None)


def _s3_options(objects: Any) -> dict[str, str]:
    """LanceDB's own client gets what boto3 found.

    Credentials that are renewed now and then (roles, SSO) are not handed over, for they would run out: LanceDB finds
    those itself.
    """
    client = objects.client
    options = {"aws_region": client.meta.region_name or "us-east-1"}
    endpoint = client.meta.endpoint_url
    if not (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
        options["aws_endpoint"] = endpoint
        options["allow_http"] = str(endpoint.startswith("http://")).lower()
    found = client._request_signer._credentials
    if found is not None and not hasattr(found, "refresh_needed"):
        frozen = found.get_frozen_credentials()
        options |= {"aws_access_key_id": frozen.access_key, "aws_secret_access_key": frozen.secret_key}
        if frozen.token:
            options["aws_session_token"] = frozen.token
    return options


def _refuse_credentials(kind: str, rest: str) -> None:
    if "@" in rest.partition("://")[2].partition("/")[0]:
        instead = "QDRANT_API_KEY" if kind == "qdrant" else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise UnknownStore(
            "credentials do not belong into the URL of a backend, which ends up in logs and in the INDEX_HASH",
            hint=f"set {instead} instead",
        )


def _refuse_relative(folder: str) -> None:
    """The spec is stored with the build and opened again by others: in their folder it would name another place, where
    the rows are not, and a build that is served would be taken for lost."""
    if folder and "://" not in folder and not Path(folder).is_absolute():
        raise UnknownStore(
            f"lance:{folder} would be another place for a process that runs in another folder",
            hint=f"use lance:{Path(folder).expanduser().absolute()}, or lance for a folder beside the objects",
        )


def _unknown(spec: str) -> UnknownStore:
    kind, mark = re.match(r"([^:+]*)([:+]?)", spec).groups()  # type: ignore[union-attr]
    shown = show_url(spec) if "://" in spec else f"{kind}{mark}{HIDDEN}" if mark else spec
    return UnknownStore(f"{shown!r} names no index backend ragfence knows", hint=f"use {FORMS}")


def _file_path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
