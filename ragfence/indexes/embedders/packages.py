"""Packages and files that only some embedders need: located when they are used, with a hint if they are missing.

Nothing here uses the network. A model that is not on this machine is an error, not a download.
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
    """Imports a module. `install` is what to install with pip if it is missing."""
    try:
        return import_module(name)
    except ImportError as missing:
        raise _missing(name, install) from missing


def find_folder(name: str, *, install: str) -> Path:
    """Returns the folder of a package without importing it: only its data files are needed."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise _missing(name, install)
    return Path(next(iter(found.submodule_search_locations)))


def digest_files(recipe: str, files: Iterable[tuple[str, Path]]) -> str:
    """Returns a short digest of the contents of files (not their paths) and of the way they are used."""
    parts = [recipe.encode()]
    for name, path in files:
        with path.open("rb") as file:
            parts += [name.encode(), hashlib.file_digest(file, "sha256").digest()]
    return digest("ragfence/embedder-files/1", *parts)[:8].hex()


def _missing(name: str, install: str) -> RagfenceError:
    return missing_package(name, install, "This embedder")
