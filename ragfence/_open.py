"""`ragfence.open()`: makes a fence from URLs, settings and a policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from ragfence._extras import needs_extra
from ragfence.core.policy import Policy
from ragfence.core.settings import Settings, load_policy, load_secret
from ragfence.core.urls import looks_like_url, show_url
from ragfence.documents.parquet import ParquetCodec
from ragfence.engine.engine import Engine
from ragfence.errors import Hint, PolicyError, UnknownStore, ValidationError
from ragfence.fence import Fence
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.telemetry.events import Listener

EMBEDDED = Path(".ragfence")
FENCE_FORMS = (
    "redis://host:6379/0, redis+sentinel://host:26379,host:26379/service/0, redis+cluster://host:6379,host:6379 "
    "(rediss... for TLS), sqlite:///path/to/fences.db, or a folder"
)
REDIS_SCHEMES = frozenset(
    ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
)
OBJECT_FORMS = "s3://bucket/prefix, file:///path, or a folder"


def open(
    store: str | os.PathLike[str] | FenceStore | None = None,
    *,
    objects: str | os.PathLike[str] | ObjectStore | None = None,
    tenant: str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    owner: str | None = None,
    run_id: str = "",
    correlation_id: str = "",
    route: str = "",
    journal: str | os.PathLike[str] | None = None,
    observe: str | Listener | Sequence[str | Listener] | None = None,
) -> Fence:
    """Opens a fence.

    Without arguments and without RAGFENCE_* variables it is embedded: SQLite and a folder, both under `.ragfence/`.

    Args:
        store: The fence store: a URL, a folder, a file, or a store of your own. By default, RAGFENCE_STORE.
        objects: The object store: a URL, a folder, or a store of your own. By default, RAGFENCE_OBJECTS; for an
            embedded fence store, the folder next to it.
        tenant: Whose operations these are. By default, RAGFENCE_TENANT.
        policy: A `Policy`, or the path of a `ragfence.yml`. By default, RAGFENCE_POLICY.
        owner: Names this process in records and decision rows. By default, host and process id.
        run_id: Stored in every decision row, as are correlation_id and route.
        journal: The folder for effects that ran while the fence store was down.
        observe: Who is notified of every decision: "metrics", "logs", "traces", or listeners of your own. None uses
            RAGFENCE_OBSERVE, and () notifies no one.

    Raises:
        UnknownStore: A URL names no store, or its package is not installed.
        StoreUnsafe: The store cannot keep the guarantees.
        PolicyError: The policy is invalid, or does not fit the stores.

    >>> fence = open()  # doctest: +SKIP
    >>> fence = open("redis://127.0.0.1:6379/0", objects="s3://bucket/prefix", tenant="acme")  # doctest: +SKIP
    """
    settings = Settings.from_env()
    tenant = tenant or settings.tenant
    rules = policy if isinstance(policy, Policy) else load_policy(policy or settings.policy)
    where = store if store is not None else settings.store or EMBEDDED
    wanted = objects if objects is not None else settings.objects
    listeners = _listeners(observe, rules)
    if isinstance(where, str | os.PathLike):
        _refuse_other_backend(where, rules)
    object_store = open_objects_of(where, wanted)
    try:
        fence_store = _open_fences(where, tenant, rules, solo=object_store is None)
        _refuse_misfit(fence_store, tenant, object_store)
    except BaseException:
        if object_store is not None and object_store is not objects:
            object_store.close()
        raise
    made_by: type[Engine] = Engine
    if listeners:
        from ragfence.telemetry.instrumented_store import InstrumentedEngine, InstrumentedStore

        fence_store, made_by = InstrumentedStore(fence_store, listeners), InstrumentedEngine
    engine = made_by(
        fence_store,
        object_store,
        rules,
        # Absolute, like all paths: a process that changes its working directory must not lose its journal.
        journal=Path(journal or EMBEDDED / "journal").absolute(),
        codec=ParquetCodec(),
        secret=partial(load_secret, rules.content_secret, tenant),
        owner=owner,
        run_id=run_id,
        correlation_id=correlation_id,
        route=route,
    )
    try:
        engine.content_hash.check_keyed()
    except BaseException:
        engine.close()
        raise
    return Fence(engine)


def _listeners(observe: str | Listener | Sequence[str | Listener] | None, rules: Policy) -> list[Listener]:
    """Called before any store is opened, so that a wrong name or a missing package leaves nothing behind."""
    if observe is None and not os.environ.get("RAGFENCE_OBSERVE"):
        return []
    from ragfence.telemetry.config import listeners_of

    return listeners_of(observe, rules)


def open_objects_of(
    where: str | os.PathLike[str] | FenceStore, wanted: str | os.PathLike[str] | ObjectStore | None
) -> ObjectStore | None:
    """Opens the object store that goes with a fence store: the one named, or the folder next to an embedded one."""
    if wanted is None and isinstance(where, str | os.PathLike) and not _is_server(where):
        wanted = _sqlite_path(where).parent / "objects"
    return _open_objects(wanted) if isinstance(wanted, str | os.PathLike) else wanted


def _refuse_other_backend(where: str | os.PathLike[str], rules: Policy) -> None:
    found, wanted = "redis" if _is_server(where) else "sqlite", rules.stores.fence
    if wanted not in (None, found):
        raise PolicyError(
            f"the policy requires fences in {wanted} (stores.fence), and {show_url(os.fspath(where))} is {found}",
            hint="open another store (or set RAGFENCE_STORE), or change the policy",
        )


def _refuse_misfit(fences: FenceStore, tenant: str, objects: ObjectStore | None) -> None:
    if fences.tenant != tenant:
        raise ValidationError(
            f"the store belongs to tenant {fences.tenant!r}, not {tenant!r}",
            hint=Hint(f"open it with tenant={fences.tenant!r}", cli=f"name it: --tenant {fences.tenant}"),
        )
    solo = getattr(fences, "solo", None)
    if solo is not None and solo != (objects is None):
        made = (
            "made with solo=True, but there is an object store"
            if solo
            else "made without solo=True, but there is no object store"
        )
        raise ValidationError(
            f"{fences.url} was {made}",
            hint="use solo=True exactly when there is no object store",
        )


def _open_fences(where: str | os.PathLike[str] | FenceStore, tenant: str, rules: Policy, *, solo: bool) -> FenceStore:
    if not isinstance(where, str | os.PathLike):
        return where
    if _is_server(where):
        fences, asked = _backend("ragfence.stores.redis.store", "redis"), rules.durability
        confirm = _backend("ragfence.stores.redis.requirements", "redis").Confirmation(
            asked.wait_replicas, asked.wait_aof, asked.wait_timeout_ms
        )
        return fences.RedisFences(os.fspath(where), tenant, solo=solo, confirm=confirm)  # type: ignore[no-any-return]
    if rules.durability.confirms:
        raise PolicyError(
            "durability: SQLite has no replicas and no append-only file to wait for",
            hint="remove the section; SQLite answers only after a commit is on disk",
        )
    from ragfence.stores.sqlite import SqliteFences

    return SqliteFences(_sqlite_path(where), tenant, solo=solo)


def _open_objects(where: str | os.PathLike[str]) -> ObjectStore:
    url, scheme = os.fspath(where), _scheme(where, OBJECT_FORMS)
    if scheme in ("", "file"):
        from ragfence.stores.local import LocalObjects

        return LocalObjects(_file_path(url) if scheme else Path(url))
    if scheme != "s3":
        raise UnknownStore(
            f"{show_url(url)!r} does not name an object store that ragfence knows", hint=f"use {OBJECT_FORMS}"
        )
    parts = _split(url)
    if parts is None or not parts.netloc:
        raise UnknownStore(f"{show_url(url)!r} does not name a bucket", hint="use s3://bucket/prefix")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise UnknownStore(
            f"{show_url(url)!r}: the URL of a bucket appears in messages, so it must not hold credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead, and use s3://bucket/prefix",
        )
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    unknown = set(query) - {"endpoint_url", "region"}
    if unknown:
        raise UnknownStore(
            f"{show_url(url)!r}: unknown {', '.join(sorted(unknown))}", hint="known: endpoint_url, region"
        )
    s3 = _backend("ragfence.stores.s3", "s3")
    return s3.S3Objects(  # type: ignore[no-any-return]
        parts.netloc,
        parts.path.strip("/"),
        endpoint_url=query.get("endpoint_url") or None,
        region=query.get("region") or None,
    )


def _scheme(where: str | os.PathLike[str], forms: str) -> str:
    """Returns what comes before `://`, or "" for a path. A path object is a path, whatever its name looks like."""
    if not isinstance(where, str):
        return ""
    scheme, separator, _ = where.partition("://")
    if scheme and separator:
        return scheme
    # `redis:localhost` is a mistake, not a folder.
    if not where or separator or looks_like_url(where):
        raise UnknownStore(
            f"{show_url(where)!r} is neither a URL nor a folder",
            hint=Hint(
                f"use {forms}; for a folder with a colon pass a pathlib.Path",
                cli=f"use {forms}; for a folder with a colon give its full path, or put ./ before it",
            ),
        )
    return ""


def _is_server(where: str | os.PathLike[str]) -> bool:
    scheme = _scheme(where, FENCE_FORMS)
    if scheme in ("", "sqlite"):
        return False
    if scheme in REDIS_SCHEMES:
        return True
    raise UnknownStore(
        f"{show_url(os.fspath(where))!r} does not name a fence store that ragfence knows", hint=f"use {FENCE_FORMS}"
    )


def _sqlite_path(where: str | os.PathLike[str]) -> Path:
    """As in SQLAlchemy: three slashes and a relative path, four and an absolute one. Or a folder, or a file."""
    url = os.fspath(where)
    if _scheme(where, FENCE_FORMS):
        host, slash, path = url.removeprefix("sqlite://").partition("/")
        if host or not slash or path in ("", ":memory:") or "?" in path:
            raise UnknownStore(
                f"{show_url(url)!r} does not name a file",
                hint="use sqlite:///relative/fences.db or sqlite:////absolute/fences.db (it must be a file)",
            )
        return Path(path).absolute()
    file = Path(url).absolute()
    return file if file.suffix in (".db", ".sqlite") else file / "fences.db"


def _file_path(url: str) -> Path:
    parts = _split(url)
    if parts is None or parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise UnknownStore(
            f"{show_url(url)!r} does not name a folder of this machine", hint="use file:///absolute/path, or a folder"
        )
    return Path(unquote(parts.path))


def _split(url: str) -> SplitResult | None:
    """Returns None for an invalid URL. Python's own error quotes the URL, which may hold a password."""
    try:
        return urlsplit(url)
    except ValueError:
        return None


def _backend(module: str, extra: str) -> Any:
    with needs_extra(extra, "This store", UnknownStore):
        return import_module(module)
