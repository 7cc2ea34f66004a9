"""Looks at the bucket behind `S3Objects`: what would make commits disappear, or cost more than it should.

The probe of conditional writes is `S3Objects.probe`, which every open runs; here is what only a person can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from ragfence.errors import RagfenceError
from ragfence.stores.checkups.check import Check, fail, ok, refused, warn
from ragfence.stores.s3 import S3Objects
from ragfence.stores.s3_errors import BotoError, brief

PROBES = ".probe/"
_UNREADABLE = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_UNSEAL = "exempt this prefix from the rule, or keep the fence in a bucket of its own: an expired commit is an effect "
_UNSEAL += "that can happen again"
_SUBJECT = "s3"


def s3_checks(store: S3Objects) -> Iterator[Check]:
    """Of a store that was opened, so it is reachable and its conditional writes work."""
    try:
        client, bucket, root = store._clients.reader, store._bucket, store._root
    except RagfenceError as error:
        yield refused(_SUBJECT, error)
        return
    yield ok(_SUBJECT, f"{store._where} answers, and conditional writes work")
    yield from _looked_up(
        lambda: client.get_bucket_versioning(Bucket=bucket), "s3:GetBucketVersioning", "versioning", versioning_checks
    )
    yield from _looked_up(
        lambda: client.get_bucket_lifecycle_configuration(Bucket=bucket),
        "s3:GetLifecycleConfiguration",
        "lifecycle rules",
        lambda answer: lifecycle_checks(answer.get("Rules", []), root),
    )


def versioning_checks(answer: Mapping[str, Any]) -> Iterator[Check]:
    match answer.get("Status"):
        case "Enabled":
            yield ok(
                _SUBJECT,
                "versioning is on; what is purged stays as noncurrent versions, which a lifecycle rule may end",
            )
        case "Suspended":
            yield warn(
                _SUBJECT,
                "versioning is suspended: old versions stay and cost, new deletions cannot be undone",
                "turn it on again, or end the noncurrent versions with a lifecycle rule",
            )
        case _:
            yield ok(_SUBJECT, "versioning is off")


def lifecycle_checks(rules: Sequence[Mapping[str, Any]], root: str) -> Iterator[Check]:
    """Which rules reach objects under `root` and take them away, or out of reach."""
    harmful = False
    for rule in rules:
        if rule.get("Status") != "Enabled" or not _reaches(rule, root):
            continue
        name = repr(rule.get("ID") or f"for {_prefix_of(rule) or 'the whole bucket'}")
        expiration = rule.get("Expiration", {})
        if "Days" in expiration or "Date" in expiration:
            harmful = True
            after = f"after {expiration['Days']} days" if "Days" in expiration else f"on {expiration['Date']}"
            yield fail(_SUBJECT, f"the lifecycle rule {name} deletes commits {after}", _UNSEAL)
        if away := sorted({move.get("StorageClass", "") for move in _transitions(rule)} & _UNREADABLE):
            harmful = True
            yield fail(
                _SUBJECT,
                f"the lifecycle rule {name} moves commits to {', '.join(away)}, where they cannot be read",
                "use a class that can be read at once (STANDARD_IA, GLACIER_IR), or exempt this prefix",
            )
    if not harmful:
        yield ok(_SUBJECT, f"no lifecycle rule takes objects away ({len(rules)} rules)")


def _transitions(rule: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    moves = rule.get("Transitions", rule.get("Transition", []))
    return [moves] if isinstance(moves, Mapping) else list(moves)


def _reaches(rule: Mapping[str, Any], root: str) -> bool:
    chosen = rule.get("Filter", {})
    both = chosen.get("And", {})
    if "Tag" in chosen or both.get("Tags"):
        return False  # our objects carry no tags
    prefix = _prefix_of(rule)
    if prefix.startswith(f"{root}{PROBES}"):
        return False  # what a probe left behind after a crash is garbage
    return prefix.startswith(root) or root.startswith(prefix)


def _prefix_of(rule: Mapping[str, Any]) -> str:
    """Three places for the same thing, from three versions of the API."""
    chosen = rule.get("Filter", {})
    return str(rule.get("Prefix") or chosen.get("Prefix") or chosen.get("And", {}).get("Prefix") or "")


def _looked_up(
    ask: Callable[[], Any], right: str, what: str, judge: Callable[[Mapping[str, Any]], Iterator[Check]]
) -> Iterator[Check]:
    try:
        answer = ask()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "NoSuchLifecycleConfiguration":
            answer = {}
        elif status in (401, 403):
            yield warn(_SUBJECT, f"could not look at the {what}", f"grant {right}, and run this again")
            return
        else:
            yield warn(_SUBJECT, f"could not look at the {what}: {brief(error)}", "ask the administrator of the server")
            return
    except BotoError as error:
        yield warn(_SUBJECT, f"could not look at the {what}: {brief(error)}", "run this again")
        return
    yield from judge(answer)
