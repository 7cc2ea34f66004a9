"""The address of an object store, for values that outlive the process that made them, and the store at an address.

An address holds no credentials: those come from where boto3 finds them, in the process that reads.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from ragfence._extras import needs_extra
from ragfence.core.urls import show_url
from ragfence.errors import UnknownStore
from ragfence.stores.objects import ObjectStore


def address_of(objects: ObjectStore) -> str | None:
    """What `open_address` takes, or None for a store that only this process can reach."""
    address: str | None = getattr(objects, "address", objects.url)
    return address if address and address.startswith(("file://", "s3://")) else None


def check_endpoint(url: str | None) -> None:
    """Raises `UnknownStore` for an endpoint that holds credentials, or that is not a URL."""
    if url is None:
        return
    if "@" in url:
        raise UnknownStore(
            "credentials do not belong into the URL of an endpoint, which ends up in messages",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
        )
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its words quote the URL
        usable = False
    if not usable:
        raise UnknownStore(f"{show_url(url)!r} is not the URL of an endpoint", hint="use http://host:9000, or https")


def open_address(address: str) -> ObjectStore:
    """Opens the store for reading. Nothing is written or created, so read-only credentials are enough."""
    try:
        parts = urlsplit(address)
    except ValueError:  # its words quote the address
        parts = urlsplit("")
    if parts.scheme == "file":
        from ragfence.stores.local import LocalObjects

        folder = Path(unquote(parts.path))
        if not folder.is_dir():
            raise UnknownStore(
                f"the folder {folder} does not exist on this machine",
                hint="read it on the machine that wrote it, or keep the objects on S3",
            )
        return LocalObjects(folder)
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise UnknownStore(
            f"{show_url(address)!r} is not the address of an object store", hint="use s3://... or file://..."
        )
    with needs_extra("s3", "Reading from S3", UnknownStore):
        from ragfence.stores.s3 import S3Objects
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    return S3Objects(
        parts.netloc,
        parts.path.strip("/"),
        endpoint_url=query.get("endpoint_url"),
        region=query.get("region"),
        probe=False,
    )
