"""What the notebooks look at when no store is named: two weeks of a help desk with a handbook, made by a real run.

Processes race, are killed with SIGKILL, frozen and continued; the stores are SQLite and a folder. Only the fence
store's clock is moved ahead, so that two weeks take half a minute. `history` tells what happens, `workers` who does it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ragfence
from ragfence.core.policy import Policy
from ragfence.stores.fences_sqlite import SqliteFences

FOLDER = Path(".ragfence") / "sample"
END = "end"
POLICY = Policy.from_mapping(
    {
        "on_conflict": {"include_diff": True},
        "lease": {"ttl_s": 1.5, "max_attempts": 3},
        "kinds": {"ticket": {"lease_ttl_s": 0.8, "ttl_hours": 24}},
    }
)


def opened(store: str | os.PathLike[str] | None, objects: str | os.PathLike[str] | None = None) -> ragfence.Fence:
    """A fence on your own store; on the sample, as it was when its two weeks were over, if there is none."""
    if store is not None:
        return ragfence.open(store, objects=objects)
    home = made()
    end_ms = int((home / END).read_text())
    fences = SqliteFences(home / "fences.db", clock=lambda: end_ms)
    return ragfence.open(fences, objects=home / "objects", policy=POLICY, observe=())


def made(folder: Path = FOLDER) -> Path:
    """The sample of this folder; made the first time, and after its code was changed."""
    here = Path(__file__).parent
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()[:12]
    home = folder.absolute() / code
    if (home / END).exists():
        return home
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draft = Path(tempfile.mkdtemp(dir=folder))
    # A process of its own: it starts others, and a kernel of Jupyter is no place to start them from.
    command = [sys.executable, "-m", "sample.history", str(draft)]
    ran = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the sample could not be made:\n{ran.stdout}{ran.stderr}")
    draft.rename(home)
    return home
