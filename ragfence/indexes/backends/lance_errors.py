"""The meaning of LanceDB's errors. It raises two types for everything, so the message decides."""

from __future__ import annotations

import re

from ragfence.errors import FormatCorrupt, RagfenceError, StoreAuth, StoreUnavailable, UnknownStore

LanceError = (RuntimeError, ValueError, OSError)
"""everything that LanceDB raises for errors of the store"""

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
    """A version was cleaned up during a read. Reading again sees the newest one."""
    return _NO_FILE.search(str(error)) is not None


def lost_race(error: Exception) -> bool:
    """Another process committed first; nothing was written."""
    return _CONFLICT.search(str(error)) is not None


def translate(error: Exception, what: str, where: str) -> RagfenceError:
    """Returns the error with what could not be done, in which database, and what to do about it."""
    text = " ".join(_PLACES.sub("", str(error)).split())
    message = f"cannot {what}, {where}: {text if len(text) <= 400 else text[:400] + '...'}"
    if _NO_BUCKET.search(text):
        return UnknownStore(message, hint="create the bucket first, or name another one")
    if _AUTH.search(text):
        rights = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the permissions of the folder"
        return StoreAuth(message, hint=f"{rights}; ragfence must read, write, list and delete there")
    if _BROKEN.search(text) or file_gone(error):
        return FormatCorrupt(message, hint="its files are damaged or gone; build the index again")
    return StoreUnavailable(message)
