"""`python -m pipelines.demo`. With `--die-at POINT` it is the process that gets killed."""

from __future__ import annotations

import sys


def die_at(point: str) -> None:
    """Runs the jobs on the state of the demo, and kills this process at a crash point."""
    from pipelines.demo.runs import Runner
    from ragfence.testing.crash_points import kill_at

    runner = Runner()
    with kill_at(point):
        runner.round("killed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--die-at"]:
        die_at(sys.argv[2])
    else:
        from pipelines.demo.story import main

        main()
