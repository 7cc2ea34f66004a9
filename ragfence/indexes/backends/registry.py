"""Opens backends by name, and chooses where LanceDB stores indexes by default."""

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
"""encoded tenants have no leading dot, so no listing of objects includes it"""


def open_backend(spec: str, *, default_lance: str, storage_options: Mapping[str, str] | None = None) -> Backend:
    """Opens the backend that a spec names. `storage_options` are for LanceDB on S3.

    Raises:
        UnknownStore: The name is not that of a backend, or its URL contains credentials.
    """
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
    except ValueError:  # the message would quote the URL, which may contain a password
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
    """Returns where LanceDB stores the indexes of these objects by default, and its storage options.

    In a folder: next to the tree of objects, inside the folder that the user named. On S3: under the same prefix.
    """
    if isinstance(objects, LocalObjects):
        return str(_file_path(objects.url) / BESIDE), {}
    if objects.url.startswith("s3://"):
        from ragfence.stores.s3 import S3Objects

        if isinstance(objects, S3Objects):
            return f"{objects.url}/{BESIDE_ON_S3}", _s3_options(objects)
    raise Unsupported(
        f"there is no default place for LanceDB indexes next to {objects.url}",
        hint=f"name the backend in the spec: {FORMS}",
    )


def _lance(uri: str, storage_options: Mapping[str, str] | None) -> Backend:
    from ragfence.indexes.backends.lance import LanceBackend

    return LanceBackend(uri, storage_options if uri.startswith("s3://") else None)


def _s3_options(objects: Any) -> dict[str, str]:
    """Passes the settings that boto3 found on to LanceDB's client.

    Credentials that are renewed from time to time (roles, SSO) are not passed on, because they would expire: LanceDB
    finds those itself.
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
            "the URL of a backend must not contain credentials: it appears in logs and in the INDEX_HASH",
            hint=f"set {instead} instead",
        )


def _refuse_relative(folder: str) -> None:
    """Refuses a relative folder. The spec is stored with the build and opened by other processes: in another working
    directory it would name another place without the rows, and a served build would look lost."""
    if folder and "://" not in folder and not Path(folder).is_absolute():
        raise UnknownStore(
            f"lance:{folder} is relative: it would be another place for a process in another folder",
            hint=f"use lance:{Path(folder).expanduser().absolute()}, or lance for a folder next to the objects",
        )


def _unknown(spec: str) -> UnknownStore:
    kind, mark = re.match(r"([^:+]*)([:+]?)", spec).groups()  # type: ignore[union-attr]
    shown = show_url(spec) if "://" in spec else f"{kind}{mark}{HIDDEN}" if mark else spec
    return UnknownStore(f"{shown!r} is not a known index backend", hint=f"use {FORMS}")


def _file_path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
