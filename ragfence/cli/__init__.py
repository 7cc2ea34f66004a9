"""`ragfence` in the terminal: one module per group of commands, each a thin layer over the library."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from ragfence.cli.app import app

    app(prog_name="ragfence")
