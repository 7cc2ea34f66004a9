"""The sample of the notebooks: two weeks of a help desk with a handbook, made by a real run.

Processes race, are killed with SIGKILL, frozen and continued. The stores are SQLite and a folder. Only the clock of the
fence store is moved ahead, so that two weeks take half a minute. `history` has the events, `workers` the processes,
and `plots` the style of all notebooks.
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
from ragfence.stores.sqlite import SqliteFences

FOLDER = Path(".ragfence") / "sample"
END = "end"
MAKERS = ("__init__.py", "history.py", "workers.py")
POLICY = Policy.from_mapping(
    {
        "on_conflict": {"include_diff": True},
        "lease": {"ttl_s": 1.5, "max_attempts": 3},
        "kinds": {"ticket": {"lease_ttl_s": 0.8, "ttl_hours": 24}},
    }
)


def open_fence(store: str | os.PathLike[str] | None, objects: str | os.PathLike[str] | None = None) -> ragfence.Fence:
    """A fence on your own store, or on the sample as it was at the end of its two weeks."""
    if store is not None:
        return ragfence.open(store, objects=objects)
    home = make_sample()
    end_ms = int((home / END).read_text())
    fences = SqliteFences(home / "fences.db", clock=lambda: end_ms)
    return ragfence.open(fences, objects=home / "objects", policy=POLICY, journal=home / "journal", observe=())


def make_sample(folder: Path = FOLDER) -> Path:
    """The folder of the sample. It is made the first time, and whenever its code has changed."""
    here = Path(__file__).parent
    code = hashlib.sha256(b"".join((here / name).read_bytes() for name in MAKERS)).hexdigest()[:12]
    home = folder.absolute() / code
    if (home / END).exists():
        return home
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=folder))
    # In another process, because it forks, and a Jupyter kernel has threads.
    command = [sys.executable, "-m", f"{__name__}.history", str(draft.absolute())]
    ran = subprocess.run(command, cwd=here.parents[1], capture_output=True, text=True, check=False)
    if ran.returncode:
        shutil.rmtree(draft)
        raise RuntimeError(f"the sample could not be made:\n{ran.stdout}{ran.stderr}")
    try:
        draft.rename(home)
    except OSError:  # another notebook was faster
        shutil.rmtree(draft)
    for other in folder.iterdir():
        if other.name != code and (other / END).exists():  # a sample of earlier code
            shutil.rmtree(other, ignore_errors=True)
    return home
