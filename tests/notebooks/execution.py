"""The notebooks in a kernel, as Jupyter runs them, on the sample.

python -m tests.notebooks.execution     all of them, anew; they are stored with what they show
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.notebooks.cells import NOTEBOOKS

KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_S = 500
"""the first one to look at the sample makes it"""


def executed(path: Path, desk: Path) -> Any:
    """Run in the folder `desk`, by this interpreter."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(desk)}}
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", record_timing=False, resources=where)
    client.create_kernel_manager()
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()
    notebook.metadata = nbformat.from_dict(KERNEL)  # without the version of this Python
    return notebook


def settings(desk: Path) -> dict[str, str]:
    """Of the environment: what Jupyter and matplotlib write goes there, too."""
    return {
        "IPYTHONDIR": str(desk / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(desk / "runtime"),
        "MPLCONFIGDIR": str(desk / "mpl"),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as desk:
        os.environ.update(settings(Path(desk)))
        for path in NOTEBOOKS:
            nbformat.write(executed(path, Path(desk)), path)
            print(f"{path.name} is as it was run just now")


if __name__ == "__main__":
    main()
