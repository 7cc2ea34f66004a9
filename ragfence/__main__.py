"""`python -m ragfence`: the command line, where the script of that name is not on the path."""

from __future__ import annotations

from ragfence.cli import main

main()
