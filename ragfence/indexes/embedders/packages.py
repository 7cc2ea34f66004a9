"""Packages and files that only some embedders need: found when they are used, and missed with a way out.

Nothing here ever asks the network. A model that is not on this machine is an error, not a download.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragfence._extras import missing_package
from ragfence.core.hashing import digest
from ragfence.errors import RagfenceError


def import_package(name: str, *, install: str) -> Any:
    """The module of that name; `install` is what pip is to be told when it is missing."""
    try:
        return import_module(name)
    except ImportError as missing:
        raise _missing(name, install) from missing


def find_folder(name: str, *, install: str) -> Path:
    """Where a package keeps its files. Nothing of it is imported: only its data is wanted, not what it does."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise _missing(name, install)
    return Path(next(iter(found.submodule_search_locations)))


def digest_files(recipe: str, files: Iterable[tuple[str, Path]]) -> str:
    """Short, over what is in the files (not where they are) and over the way they are used."""
    parts = [recipe.encode()]
    for name, path in files:
        with path.open("rb") as file:
            parts += [name.encode(), hashlib.file_digest(file, "sha256").digest()]
    return digest("ragfence/embedder-files/1", *parts)[:8].hex()


def _missing(name: str, install: str) -> RagfenceError:
    return missing_package(name, install, "This embedder")
