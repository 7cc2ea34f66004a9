"""`make ui`: `dagster dev` on the state of the demo, or on the stores that RAGFENCE_STORE names."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from pipelines.demo.state import FOLDER, State

HOST = "127.0.0.1"
"""The UI has no passwords: whoever can connect may run jobs."""
PORT = "3000"
# `dg dev` needs a project with a pyproject.toml; `dagster dev` also starts from an installed wheel.
_HUSH = "ignore:Function `dev_command` is superseded"


def main() -> None:
    console = Console()
    state = State.here()
    ran = state.corpus.is_dir()
    state.prepare()
    state.quiet_dagster()
    if not os.environ.get("RAGFENCE_STORE"):
        os.environ["RAGFENCE_STORE"] = str(state.folder)
        if ran:
            state.use_corpus()
        else:
            console.print(
                f"The demo has not run yet: there is nothing under {FOLDER}. Run `make demo`, or materialize the "
                "assets in the UI.",
                soft_wrap=True,
            )
    port = os.environ.get("PORT") or PORT
    console.print(f"http://{HOST}:{port}  (stop with Ctrl-C)", highlight=False)
    dagster_dev = ["-m", "dagster", "dev", "-m", "pipelines.definitions", "-h", HOST, "-p", port]
    os.execv(sys.executable, [sys.executable, "-W", _HUSH, *dagster_dev])


if __name__ == "__main__":
    main()
