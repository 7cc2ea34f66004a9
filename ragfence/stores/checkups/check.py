"""What `ragfence doctor` finds, as values: a check says how one thing is, and what to do about it.

The functions here judge facts and read nothing; those who gather the facts are `redis_checkup`, `disk_checkup` and
`s3_checkup`. A refusal of a store is a check too, so that one broken store does not hide the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ragfence.core.policy import Policy
from ragfence.errors import Hint, RagfenceError
from ragfence.stores.fences import Marker


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """it works, but should be looked at"""
    FAIL = "fail"
    """a promise is broken, or nothing works"""


@dataclass(frozen=True, slots=True)
class Check:
    subject: str
    level: Level
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Check:
    return Check(subject, Level.OK, text)


def warn(subject: str, text: str, advice: str) -> Check:
    return Check(subject, Level.WARN, text, advice)


def fail(subject: str, text: str, advice: str) -> Check:
    return Check(subject, Level.FAIL, text, advice)


def refused(subject: str, error: RagfenceError) -> Check:
    """What `ragfence.open` would have raised."""
    return fail(subject, error.message or type(error).__name__, error.hint)


def worst(checks: Iterable[Check]) -> Level:
    levels = {check.level for check in checks}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)


def policy_check(policy: Policy, file: str | None) -> Check:
    ttl = policy.stores.ttl
    return ok(
        "policy",
        f"{file or 'the defaults, no file'}; sealed keys answer for {ttl.webhook_days:g} d (webhook), "
        f"{ttl.api_hours:g} h (api), {ttl.batch_days:g} d (batch), pending ones are kept {ttl.pending_days:g} d; "
        f"on_store_error: {policy.on_store_error}",
    )


def journal_check(folder: str, waiting: int, *, oldest_age: str = "") -> Check:
    if not waiting:
        return ok("journal", f"nothing waits in {folder}")
    return warn(
        "journal",
        f"{waiting} effect{'s' * (waiting != 1)} ran while the fence store was down, not sealed yet ({folder}, oldest "
        f"{oldest_age})",
        Hint(
            "call fence.reconcile_journal() on this machine: until then other machines may perform them again",
            cli="run `ragfence journal reconcile` on this machine: until then other machines may perform them again",
        ),
    )


class QueueDepth(Protocol):
    @property
    def visible(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def dead(self) -> int: ...


def queue_checks(subject: str, depth: QueueDepth, *, visibility_s: float, lease_s: float) -> Iterator[Check]:
    yield ok(subject, f"answers; {depth.visible} waiting, {depth.in_flight} in flight")
    if depth.dead:
        yield warn(
            subject,
            f"{depth.dead} dead letter{'s' * (depth.dead != 1)}",
            "read their reasons, remove the cause, then replay or drop them",
        )
    hidden = f"messages are hidden for {visibility_s:g} s, and a lease lasts {lease_s:g} s"
    if visibility_s < lease_s:
        advice = "raise the visibility of the queue, or lower lease.ttl_s of the policy: consumers refuse to start"
        yield fail(subject, hidden, advice)
    else:
        yield ok(subject, hidden)


def markers_check(subject: str, markers: Sequence[Marker | None], *, solo: bool) -> Check:
    """Whether the shards may answer. Only an object store can make those ready that may not."""
    there = [marker for marker in markers if marker is not None]
    usable = [marker for marker in there if marker.usable]
    if not there:
        return ok(subject, "empty: nothing was ever claimed here, or the store was flushed")
    epoch = max(marker.epoch for marker in there)
    if solo:
        if len(usable) == len(there):
            return ok(subject, f"{len(usable)} of {len(markers)} shards in use, newest epoch {epoch}")
        return warn(
            subject,
            f"the store was restarted: {len(there) - len(usable)} of {len(there)} shards start a new epoch with their "
            "next claim, and what was lost is lost",
            "an effect whose record was lost happens again: put an object store behind it (--objects), or turn "
            "persistence on",
        )
    if len(usable) == len(markers) and len({marker.epoch for marker in usable}) == 1:
        return ok(subject, f"epoch {epoch}, all {len(markers)} shards ready")
    hydrating = sum(not marker.ready for marker in there)
    state = f"{hydrating} being hydrated" if hydrating else "the others wait for it"
    return warn(
        subject,
        f"epoch {epoch}, {len(usable)} of {len(markers)} shards ready, {state}",
        "nothing to do: the next claim hydrates the store from its objects; `ragfence hydrate` does it now",
    )


def space_check(subject: str, free_bytes: int, total_bytes: int) -> Check:
    share = free_bytes / total_bytes if total_bytes else 0.0
    text = f"{free_bytes / 2**30:.1f} GiB free of {total_bytes / 2**30:.1f} ({share:.0%})"
    if free_bytes < 128 * 2**20:
        return fail(subject, text, "free some space: without room nothing can be claimed or committed")
    if free_bytes < 2**30 or share < 0.05:
        return warn(subject, text, "free some space soon, or move the store: a full disk stops every claim")
    return ok(subject, text)


NETWORK_FILESYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "9p", "davfs", "gfs2", "ocfs2"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.goofys", "fuse.gcsfuse", "fuse.davfs2"),
    }
)


def filesystem_of(path: str, mounts: str) -> str:
    """The type of the filesystem that holds the absolute `path`, given the text of /proc/mounts; empty: unknown."""
    best, found = "", ""
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = _unescaped(parts[1]).rstrip("/")
        # The last of equal ones lies on top.
        if (path == point or path.startswith(f"{point}/")) and len(point) >= len(best):
            best, found = point, parts[2]
    return found


def filesystem_check(subject: str, filesystem: str, *, needs: str) -> Check:
    if not filesystem:
        return ok(subject, "the kind of filesystem cannot be seen on this system")
    if filesystem in NETWORK_FILESYSTEMS:
        return fail(subject, f"on {filesystem}, a network filesystem: {needs}", "move it to a local disk, or use Redis")
    return ok(subject, f"on {filesystem}")


def _unescaped(text: str) -> str:
    """/proc/mounts writes blanks as \\040."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
