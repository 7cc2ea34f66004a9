"""The documents of the demo: a few hundred that are on every machine already.

They are the manual that comes with Python (what `help("with")` prints) and the READMEs of the installed distributions.
They are written to a folder once (`manual/with.txt`, `packages/dagster.md`), which is then used like any other folder.
Some systems install Python without its manual; then the READMEs are the only documents.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfence.errors import ValidationError

MANUAL, PACKAGES = "manual", "packages"
TOPICS = "pydoc_data.topics"
MAX_CHARACTERS = 100_000
"""The limit for one document. A longer README usually contains the changelog of all versions."""
MAX_TOTAL_CHARACTERS = 4_000_000
"""The limit for all documents, so that the demo takes minutes whatever is installed."""
AGE_S = 3600
"""How far the files are dated back. A source reads recent files again, because they may change unnoticed."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ufffd]")
_MAX_CONTROL_SHARE = 0.01
_NO_README = ("", "UNKNOWN")
"""What build tools write if there is no README."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """How many documents were written and skipped."""

    topics: int
    """Documents from Python's manual."""
    readmes: int
    skipped: Mapping[str, int]
    """How many documents were skipped, by reason."""

    def __str__(self) -> str:
        manual = f"{self.topics} topics of Python's manual" if self.topics else "no manual (this Python has none)"
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        skipped = f"; {sum(self.skipped.values())} skipped ({why})" if why else ""
        readmes = f"{self.readmes} README{'s' * (self.readmes != 1)} of installed packages"
        return f"{manual} and {readmes}{skipped}"


def has_manual(folder: Path) -> bool:
    """Whether the manual is in the corpus of this folder, or would be if it were written now."""
    if folder.is_dir():
        return (folder / MANUAL).is_dir()
    try:
        return importlib.util.find_spec(TOPICS) is not None
    except (ImportError, ValueError):  # the package is missing or broken
        return False


def ensure_corpus(folder: Path) -> Path:
    """Returns the folder, and writes the corpus to it if it does not exist."""
    if not folder.is_dir():
        write_corpus(folder)
    return folder


def write_corpus(folder: Path) -> Corpus:
    """Writes the corpus atomically. If another process was faster, its corpus is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        written = _write(draft)
        if not written.topics + written.readmes:
            raise ValidationError(
                "this Python has neither a manual nor packages with a README",
                hint="name documents of your own: RAGFENCE_DEMO_SOURCE",
            )
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return written


def _write(folder: Path) -> Corpus:
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    total, dated = 0, time.time() - AGE_S
    for place, name, suffix, raw in [*_read_topics(), *_read_readmes()]:
        text, problem = _check_text(name, raw)
        if not problem and total + len(text) > MAX_TOTAL_CHARACTERS:
            problem = "beyond the total"
        if problem:
            skipped[problem] += 1
            continue
        total += len(text)
        counts[place] += 1
        file = folder / place / f"{name}{suffix}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        os.utime(file, (dated, dated))
    return Corpus(counts[MANUAL], counts[PACKAGES], dict(skipped))


def _read_topics() -> Iterator[tuple[str, str, str, Any]]:
    try:
        topics = importlib.import_module(TOPICS).topics
    except (ImportError, AttributeError):
        return
    for name in sorted(topics):
        yield MANUAL, name.lower(), ".txt", topics[name]


def _read_readmes() -> Iterator[tuple[str, str, str, Any]]:
    """READMEs by name. If a distribution is installed twice, the one that would be imported is used."""
    found: dict[str, tuple[str, str, str, Any]] = {}
    for number, distribution in enumerate(importlib.metadata.distributions()):
        try:
            metadata: Any = distribution.metadata
            name = re.sub(r"[-_.]+", "-", metadata.get("Name")).lower()
            suffix = ".md" if (metadata.get("Description-Content-Type") or "").startswith("text/markdown") else ".txt"
            readme = PACKAGES, name, suffix, metadata.get("Description") or ""
        except UnicodeDecodeError:
            readme = PACKAGES, f"?{number}", "", b""
        except Exception:  # noqa: BLE001  # foreign metadata may be broken in any way
            readme = PACKAGES, f"?{number}", "", None
        found.setdefault(readme[1], readme)
    for name in sorted(found):
        yield found[name]


def _check_text(name: str, raw: Any) -> tuple[str, str]:
    """The text to write, or the reason to skip it."""
    if raw is None:
        return "", "without metadata"
    if not isinstance(raw, str) or not _NAME.fullmatch(name):
        return "", "not text"
    if raw.strip() in _NO_README:
        return "", "empty"
    if len(raw) > MAX_CHARACTERS:
        return "", "too long"
    try:
        raw.encode()
    except UnicodeEncodeError:
        return "", "not text"
    if len(_CONTROLS.findall(raw)) > len(raw) * _MAX_CONTROL_SHARE:
        return "", "not text"
    return raw.replace("\r\n", "\n").replace("\r", "\n").strip("\n") + "\n", ""
