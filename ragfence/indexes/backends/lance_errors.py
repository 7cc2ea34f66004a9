"""What LanceDB's errors mean. It has two types for everything, so the words decide."""

from __future__ import annotations

import re

from ragfence.errors import FormatCorrupt, RagfenceError, StoreAuth, StoreUnavailable, UnknownStore

LanceError = (RuntimeError, ValueError, OSError)
"""all that LanceDB raises for what goes wrong in the store"""

_NO_TABLE = re.compile(r"Table '.*' was not found|Not found: \S*\.lance/_versions")
_NO_FILE = re.compile(r"Not found: ", re.IGNORECASE)
_CONFLICT = re.compile(
    r"commit conflict|Retryable commit|preempted|Too many concurrent writers|Incompatible transaction", re.IGNORECASE
)
_AUTH = re.compile(
    r"status: (?:401|403)|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken"
    r"|credentials? provider|no credentials|Unauthenticated|Permission denied",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.IGNORECASE)
_BROKEN = re.compile(
    r"Invalid range|corrupt|protobuf|magic|decode|too small|fill whole buffer|sufficient data", re.IGNORECASE
)
_PLACES = re.compile(r",? ?/\S+\.rs:\d+:\d+|<\?xml[^>]*>|\\n")


def no_table(error: Exception) -> bool:
    return _NO_TABLE.search(str(error)) is not None


def file_gone(error: Exception) -> bool:
    """A version was cleaned up under a reader. Whoever looks again sees the newest one."""
    return _NO_FILE.search(str(error)) is not None


def lost_race(error: Exception) -> bool:
    """Somebody else committed in between; nothing was written."""
    return _CONFLICT.search(str(error)) is not None


def translate(error: Exception, what: str, where: str) -> RagfenceError:
    """The error for people: what could not be done, in which database, and what to do about it."""
    told = " ".join(_PLACES.sub("", str(error)).split())
    said = f"cannot {what}, {where}: {told if len(told) <= 400 else told[:400] + '...'}"
    if _NO_BUCKET.search(told):
        return UnknownStore(said, hint="create the bucket first, or name another one")
    if _AUTH.search(told):
        rights = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the rights on the folder"
        return StoreAuth(said, hint=f"{rights}; the index needs to be read, written, listed and deleted there")
    if _BROKEN.search(told) or file_gone(error):
        return FormatCorrupt(said, hint="its files are damaged or gone; build the index again")
    return StoreUnavailable(said)
