"""Packages that an extra of ragfence installs: a missing one is an error that names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ragfence.errors import RagfenceError, Unsupported


@contextmanager
def needs_extra(extra: str, use: str, kind: type[RagfenceError] = Unsupported) -> Iterator[None]:
    """Around imports: turns a missing package into an error that names `ragfence[extra]`.

    Args:
        extra: The extra of ragfence that installs what is imported inside.
        use: What cannot be used without it; the subject of the message.
        kind: The class of the error.

    >>> with needs_extra("s3", "An object store on S3"):
    ...     import boto3
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("", "ragfence"):  # a bug in ragfence: installing a package does not fix it
            raise
        raise missing_package(package, f"ragfence[{extra}]", use, kind) from missing


def missing_package(package: str, install: str, use: str, kind: type[RagfenceError] = Unsupported) -> RagfenceError:
    """Returns the error for a missing package; `install` is the argument for `pip install`."""
    return kind(f"{use} needs the package {package!r}, which is not installed", hint=f"pip install '{install}'")
