"""Optimistic concurrency: a document is moved only if it still is at the version that its caller has read.

A version is the fence number of the head (`Receipt.fence`, `StoredDocument.fence`), which no two moves share. It is
compared under the lease, when nobody else can move the head; asking before that only spares most callers an attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from ragfence.core.decisions import Claim, Granted
from ragfence.core.records import Head
from ragfence.documents.claims import Prepared
from ragfence.engine.batch_commit import Effected
from ragfence.errors import DocumentMoved, ValidationError

NOTHING = ""
"""the version of a document that is not there"""
ANY = "*"
"""expects that the document is there, at whatever version"""

Expected = str | frozenset[str]
"""a version, or several of which any will do"""

Effect = Callable[[Prepared, Granted], Effected]


def version_of(head: Head | None) -> str:
    return str(head.record.fence) if head is not None and head.live and head.record else NOTHING


def is_as_asked(head: Head | None, claim: Claim) -> bool:
    """Whether the head is what the claim wants to make it: perhaps by an attempt of the same caller that was cut off.

    RFC 9110, 13.1.1: a condition that fails because the change was already made may be answered as done.
    """
    if claim.retract:
        return head is None or not head.live
    return (
        head is not None
        and head.live
        and head.digest == claim.digest
        and head.metadata_hash == claim.metadata_hash
        and (claim.sequence is None or claim.sequence == head.sequence)
    )


def check(doc_id: str, head: Head | None, expected: Expected | None, claim: Claim) -> None:
    """Raises `DocumentMoved`, unless it is as the claim wants it. None expects nothing."""
    if expected is None:
        return
    if not isinstance(expected, str | frozenset):
        raise ValidationError(f"expect is a version, as receipt.fence, or a frozenset of them, not {expected!r}")
    current = version_of(head)
    if isinstance(expected, frozenset):
        as_expected = current != NOTHING and current in expected
    else:
        as_expected = current != NOTHING if expected == ANY else current == expected
    if not as_expected and not is_as_asked(head, claim):
        where = f"at version {current}" if current else "not there"
        wanted = f"expected at {expected}" if expected else "expected not to be there"
        if isinstance(expected, frozenset):
            wanted = f"expected at {' or '.join(sorted(expected)) or 'another, by a weak tag'}"
        if expected == ANY:
            wanted = "expected to be there"
        raise DocumentMoved(f"document {doc_id!r} is {where}, and {wanted}", doc_id=doc_id, current=current)


def expecting(effect: Effect, expected: Expected | None) -> Effect:
    """The effect, unless the head has moved."""
    if expected is None:
        return effect

    def checked_first(subject: Prepared, grant: Granted) -> Effected:
        check(subject.doc.doc_id, grant.head, expected, subject.claim)
        return effect(subject, grant)

    return checked_first
