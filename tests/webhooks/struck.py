"""The command line, in a process that kills itself at a point of a webhook's way.

python -m tests.webhooks.struck POINT ARGUMENTS...

Points: before_effect, after_effect (the document is ingested, the event is not sealed), after_seal, or none.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ragfence.cli.app import app
from ragfence.engine.claim_block import ClaimBlock
from ragfence.webhooks import policy_hooks


def strike() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(point: str) -> None:
    apply, seal = policy_hooks.apply_change, ClaimBlock.seal

    def struck_apply(*args: Any) -> Any:
        if point == "before_effect":
            strike()
        return apply(*args)

    def struck_seal(self: Any, **told: Any) -> Any:
        if self._request.operation.kind != "webhook":
            return seal(self, **told)
        if point == "after_effect":
            strike()
        receipt = seal(self, **told)
        if point == "after_seal":
            strike()
        return receipt

    policy_hooks.apply_change = struck_apply  # type: ignore[assignment]  # takes whatever it is given
    ClaimBlock.seal = struck_seal  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    install(sys.argv[1])
    app(sys.argv[2:])
