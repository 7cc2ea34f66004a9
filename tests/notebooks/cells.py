"""The notebooks on a store of somebody's own: all their cells, one after the other, in one process without a kernel.

python -m tests.notebooks.cells STORE [OBJECTS]
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
VERDICT = "every promise kept"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def looking_at(path: Path, store: str | None, objects: str | None = None) -> Any:
    """A notebook whose first cell names this store."""
    notebook = nbformat.read(path, as_version=4)
    first = code_cells(notebook)[0]
    for name, value in (("STORE", store), ("OBJECTS", objects)):
        assert f"\n{name} = None " in f"\n{first.source}", f"{path.stem} does not begin with {name} = None"
        first.source = first.source.replace(f"{name} = None ", f"{name} = {value!r} ", 1)
    return notebook


def problems(folder: Path, store: str, objects: str | None, environment: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the notebooks on this store. Nothing is written but matplotlib's cache, into the folder."""
    command = [sys.executable, "-m", "tests.notebooks.cells", store, *([objects] if objects else [])]
    of_its_own = {"MPLCONFIGDIR": str(folder / "mpl"), "MPLBACKEND": "agg", "IPYTHONDIR": str(folder / "ipython")}
    ran = subprocess.run(
        command,
        cwd=FOLDER.parent,
        env={**environment, **of_its_own},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        yield f"a notebook failed: {ran.stderr}"
    elif ran.stdout.count(VERDICT) != len(NOTEBOOKS):
        yield f"a notebook does not end with the proof: {ran.stdout}"


def main(store: str, objects: str | None = None) -> None:
    import matplotlib.pyplot as plt

    warnings.simplefilter("error")  # a plot that does not fit is a warning
    for path in NOTEBOOKS:
        known: dict[str, Any] = {"__name__": "__main__"}
        for number, cell in enumerate(code_cells(looking_at(path, store, objects)), start=1):
            exec(compile(cell.source, f"{path.stem}, cell {number}", "exec"), known)
            for figure in map(plt.figure, plt.get_fignums()):
                figure.canvas.draw()
            plt.close("all")


if __name__ == "__main__":
    main(*sys.argv[1:])
