"""`ragfence` in the terminal. One file per group of commands; the work is done where the library does it."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from ragfence.cli.app import app

    app(prog_name="ragfence")
