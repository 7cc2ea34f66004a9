"""Which of the tables that LanceDB lists on S3 hold anything.

LanceDB lists folders. Some S3 servers (SeaweedFS) keep the folder of a table after its last object is deleted, so a
table that was dropped would be listed for ever. A table is there if at least one object is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

WORKERS = 8


class RemoteFolders:
    """The folders of the tables under an `s3://` URI, asked with the storage options that LanceDB has."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        parts = urlsplit(uri)
        self._bucket, self._root = parts.netloc, parts.path.strip("/")
        self._client = _client(options) if parts.scheme == "s3" else None

    def holding(self, names: Iterable[str]) -> list[str]:
        """The names of those that hold at least one object; all of them, where nobody can tell."""
        listed = list(names)
        if self._client is None or not listed:
            return listed
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="ragfence-folders") as pool:
            return [name for name, held in zip(listed, pool.map(self._holds, listed), strict=True) if held]

    def _holds(self, name: str) -> bool:
        prefix = f"{self._root}/{name}.lance/".lstrip("/")
        from ragfence.stores.s3_errors import BotoError, translate

        assert self._client is not None
        try:
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=2)
        except BotoError as error:
            raise translate(error, f"list {name}", self._bucket, f"s3://{self._bucket}/{self._root}") from error
        # A key that ends with a slash is a folder's own marker.
        return any(not item["Key"].endswith("/") for item in answer.get("Contents", []))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _client(options: Mapping[str, str]) -> Any:
    """None without boto3: then LanceDB's listing stands as it is."""
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError:
        return None
    endpoint = options.get("aws_endpoint")
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("aws_region"),
        aws_access_key_id=options.get("aws_access_key_id"),
        aws_secret_access_key=options.get("aws_secret_access_key"),
        aws_session_token=options.get("aws_session_token"),
        config=Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"mode": "standard", "total_max_attempts": 3},
            s3={"addressing_style": "path" if endpoint else "auto"},
        ),
    )
