"""`ragfence doctor`: checks of policy, stores and journal. They also run where `ragfence.open` would raise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, StoreOptions, Stores
from ragfence.cli.policy import policy_file
from ragfence.errors import RagfenceError

if TYPE_CHECKING:
    from ragfence.core.policy import Policy
    from ragfence.stores.checkups.check import Check


def doctor(
    *,
    stores: Stores,
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", metavar="FOLDER", help="The folder of the journal, if not .ragfence/journal."),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="URL", help="Also check this queue, for example redis://host/0?queue=inbox."),
    ] = None,
) -> None:
    """Check policy, stores, journal and queues, with advice. Exits with 1 if something must be repaired."""
    from ragfence.stores.checkups.check import Level, worst

    checks = []
    for check in _checks(stores, journal, queue or []):
        checks.append(check)
        if not as_json:
            _print(check)
    level = worst(checks)
    if as_json:
        documents = [
            {
                "subject": check.subject,
                "level": check.level,
                "text": check.text,
                "advice": output.format_hint(check.advice) or None,
            }
            for check in checks
        ]
        output.print_json({"level": level, "checks": documents})
    else:
        counts = {each: sum(check.level is each for check in checks) for each in Level}
        output.echo(", ".join(f"{count} {each}" for each, count in counts.items()))
    if level is Level.FAIL or (strict and level is Level.WARN):
        raise typer.Exit(1)


def _checks(stores: StoreOptions, journal: Path | None, queues: list[str]) -> Iterator[Check]:
    from ragfence.core.policy import Policy
    from ragfence.core.settings import load_policy
    from ragfence.stores.checkups.check import fail, policy_check, refused

    rules, file = Policy(), stores.policy or policy_file()
    try:
        rules = load_policy(file)
        yield policy_check(rules, file)
    except RagfenceError as error:  # the rest is checked with the default policy
        for problem in error.details.get("problems", ()):
            yield fail("policy", f"{file}: {problem}", "correct it; nothing can be opened with an invalid policy")
        if not error.details.get("problems"):
            yield refused("policy", error)
    yield from _fences(stores, rules)
    yield from _objects(stores)
    yield _journal(journal, stores.tenant_name, rules)
    for url in queues:
        yield from _queue(url, rules)


def _fences(stores: StoreOptions, rules: Policy) -> Iterator[Check]:
    from ragfence._open import _refuse_other_backend
    from ragfence.stores.checkups.check import Level, refused, worst

    try:
        file, solo = stores.sqlite_file(), stores.objects_location is None
    except RagfenceError as error:
        yield refused("store", error)
        return
    subject = "sqlite" if file else "redis"
    try:
        _refuse_other_backend(stores.fences_location, rules)
    except RagfenceError as error:
        yield refused("policy", error)
    try:
        checks = list(_sqlite(file) if file else _redis(stores, rules, solo=solo))
    except RagfenceError as error:
        yield refused(subject, error)
        return
    yield from checks
    # A broken store has been reported above, and a missing one has no markers.
    if worst(checks) is not Level.FAIL and (file is None or file.exists()):
        yield from _markers(stores, rules, subject, solo=solo)


def _redis(stores: StoreOptions, rules: Policy, *, solo: bool) -> Iterator[Check]:
    from ragfence._open import _backend

    checkup = _backend("ragfence.stores.checkups.redis_server", "redis")
    facts = checkup.look(str(stores.fences_location), stores.tenant_name, rules.durability)
    yield from checkup.redis_checks(facts, rules.durability, solo=solo)


def _sqlite(file: Path) -> Iterator[Check]:
    from ragfence.stores.checkups.disk import sqlite_checks

    yield from sqlite_checks(file)


def _markers(stores: StoreOptions, rules: Policy, subject: str, *, solo: bool) -> Iterator[Check]:
    """Opens the store as a claim would."""
    from ragfence._open import _open_fences
    from ragfence.stores.checkups.check import markers_check, refused

    try:
        fences = _open_fences(stores.fences_location, stores.tenant_name, rules, solo=solo)
        try:
            yield markers_check(subject, fences.markers(), solo=solo)
        finally:
            fences.close()
    except RagfenceError as error:
        yield refused(subject, error)


def _objects(stores: StoreOptions) -> Iterator[Check]:
    from ragfence._open import _backend, _open_objects
    from ragfence.stores.checkups.check import refused
    from ragfence.stores.checkups.disk import folder_checks

    try:
        where = stores.objects_location
    except RagfenceError:
        return  # the fence store is invalid too, and was reported
    if where is None:
        return
    try:
        if folder := stores.objects_folder():
            yield from folder_checks(folder)
            return
        store = _open_objects(where)
    except RagfenceError as error:
        yield refused("objects", error)
        return
    try:
        yield from _backend("ragfence.stores.checkups.bucket", "s3").s3_checks(store)
    finally:
        store.close()


def _journal(folder: Path | None, tenant: str, rules: Policy) -> Check:
    from ragfence._open import EMBEDDED
    from ragfence.engine.journal import Journal
    from ragfence.engine.results import Results
    from ragfence.stores.checkups.check import journal_check, refused

    path = (folder or EMBEDDED / "journal").absolute()
    try:
        entries = Journal(path, tenant, Results(tenant, rules, None)).entries()
    except RagfenceError as error:
        return refused("journal", error)
    oldest = min((entry.at_ms for entry in entries), default=0)
    return journal_check(str(path), len(entries), oldest_age=output.ago(oldest, time.time_ns() // 1_000_000))


def _queue(url: str, rules: Policy) -> Iterator[Check]:
    from ragfence.queues import open_transport
    from ragfence.queues.streams import RedisStreamTransport
    from ragfence.stores.checkups.check import ok, queue_checks, refused

    scheme, _, path = url.partition("?")[0].partition(":///")
    if scheme.startswith("sqlite") and path and not Path(path).exists():  # opening it would create it
        yield ok("queue", f"{path} is not there yet; the first message creates it")
        return
    try:
        transport = open_transport(url)
    except RagfenceError as error:
        yield refused("queue", error)
        return
    subject = f"queue {transport.name}"
    try:
        yield from queue_checks(
            subject,
            transport.depth(),
            visibility_s=transport.visibility_s,
            lease_s=rules.for_kind("queue").lease_ms / 1000,
        )
        if isinstance(transport, RedisStreamTransport):
            yield transport.check_durability()
    except RagfenceError as error:
        yield refused(subject, error)
    finally:
        transport.close()


def _print(check: Check) -> None:
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    line = Text(f"{check.level:<4}", style=styles[check.level])
    line.append(f"  {check.subject}: {output.plain(check.text)}", style="default")
    if check.advice:
        line.append(f"\n      -> {output.format_hint(check.advice)}", style="default")
    output.out().print(line, soft_wrap=True)
