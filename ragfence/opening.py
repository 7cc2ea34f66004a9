"""`ragfence.open()`: from URLs, settings and a policy to a fence."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ragfence.core.policy import Policy
from ragfence.core.settings import Settings, load_policy
from ragfence.engine.engine import Engine
from ragfence.errors import UnknownStore, ValidationError
from ragfence.fence import Fence
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

EMBEDDED = Path(".ragfence")
FENCE_FORMS = "redis://host:6379/0, rediss://..., sqlite:///path/to/fences.db, or a folder"
OBJECT_FORMS = "s3://bucket/prefix, file:///path, or a folder"


def open(
    store: str | os.PathLike[str] | FenceStore | None = None,
    *,
    objects: str | os.PathLike[str] | ObjectStore | None = None,
    tenant: str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    owner: str | None = None,
    run_id: str = "",
    journal: str | os.PathLike[str] | None = None,
) -> Fence:
    """Opens a fence.

    Without arguments and without RAGFENCE_* variables it is embedded: SQLite and a folder under `.ragfence/`.

    >>> fence = open()  # doctest: +SKIP
    >>> fence = open("redis://127.0.0.1:6379/0", objects="s3://bucket/prefix", tenant="acme")  # doctest: +SKIP
    """
    settings = Settings.from_env()
    tenant = tenant or settings.tenant
    rules = policy if isinstance(policy, Policy) else load_policy(policy or settings.policy)
    where = store if store is not None else settings.store
    wanted = objects if objects is not None else settings.objects
    if where is None:
        where = EMBEDDED
    if wanted is None and isinstance(where, str | os.PathLike) and not _is_server(os.fspath(where)):
        wanted = _sqlite_path(os.fspath(where)).parent / "objects"
    object_store = _open_objects(wanted) if isinstance(wanted, str | os.PathLike) else wanted
    try:
        fence_store = _open_fences(where, tenant, solo=object_store is None)
    except BaseException:
        if object_store is not None:
            object_store.close()
        raise
    if fence_store.tenant != tenant:
        raise ValidationError(f"the store belongs to tenant {fence_store.tenant!r}, not to {tenant!r}")
    engine = Engine(
        fence_store,
        object_store,
        rules,
        journal=Path(journal) if journal else EMBEDDED / "journal",
        owner=owner,
        run_id=run_id,
    )
    return Fence(engine)


def _open_fences(where: str | os.PathLike[str] | FenceStore, tenant: str, *, solo: bool) -> FenceStore:
    if not isinstance(where, str | os.PathLike):
        return where
    url = os.fspath(where)
    if _is_server(url):
        fences = _backend("ragfence.stores.fences_redis", "redis")
        return fences.RedisFences(url, tenant, solo=solo)  # type: ignore[no-any-return]
    from ragfence.stores.fences_sqlite import SqliteFences

    return SqliteFences(_sqlite_path(url), tenant, solo=solo)


def _open_objects(where: str | os.PathLike[str]) -> ObjectStore:
    url = os.fspath(where)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        from ragfence.stores.objects_local import LocalObjects

        return LocalObjects(Path(rest if separator else url))
    if scheme != "s3":
        raise UnknownStore(f"{url!r} names no object store ragfence knows", hint=f"use {OBJECT_FORMS}")
    parts = urlsplit(url)
    if not parts.netloc:
        raise UnknownStore(f"{url!r} names no bucket", hint="use s3://bucket/prefix")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = set(query) - {"endpoint_url", "region"}
    if unknown:
        raise UnknownStore(f"{url!r}: unknown {', '.join(sorted(unknown))}", hint="known: endpoint_url, region")
    s3 = _backend("ragfence.stores.objects_s3", "s3")
    return s3.S3Objects(  # type: ignore[no-any-return]
        parts.netloc, parts.path.strip("/"), endpoint_url=query.get("endpoint_url"), region=query.get("region")
    )


def _is_server(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme == "sqlite":
        return False
    if scheme in ("redis", "rediss", "unix"):
        return True
    raise UnknownStore(f"{url!r} names no fence store ragfence knows", hint=f"use {FENCE_FORMS}")


def _sqlite_path(url: str) -> Path:
    scheme, separator, rest = url.partition("://")
    path = Path(rest.removeprefix("/") if separator and not rest.startswith("//") else rest[1:] or url)
    if separator:
        return path
    path = Path(scheme)
    return path if path.suffix in (".db", ".sqlite") else path / "fences.db"


def _backend(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        raise UnknownStore(
            f"this store needs the package {missing.name!r}", hint=f'pip install "ragfence[{extra}]"'
        ) from missing
