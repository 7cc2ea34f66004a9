"""Named points of the protocol at which tests kill, freeze or delay the process.

`reach` does nothing unless `ragfence.testing.at_point` installed a visitor; it costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable

AFTER_CLAIM = "after_claim"
IN_EFFECT = "in_effect"
AFTER_EFFECT = "after_effect"
AFTER_COMMIT = "after_commit"
BEFORE_SEAL = "before_seal"
AFTER_SEAL = "after_seal"
AFTER_BEGUN = "after_begun"
AFTER_MARKED = "after_marked"
AFTER_LISTED = "after_listed"
AFTER_LOADED = "after_loaded"

OPERATION_POINTS = (AFTER_CLAIM, IN_EFFECT, AFTER_EFFECT, AFTER_COMMIT, BEFORE_SEAL, AFTER_SEAL)
HYDRATION_POINTS = (AFTER_BEGUN, AFTER_MARKED, AFTER_LISTED, AFTER_LOADED)

visitor: Callable[[str], None] | None = None


def reach(point: str) -> None:
    if visitor is not None:
        visitor(point)
