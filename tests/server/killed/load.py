"""Many requests, and what is known of each by its number alone: `sent(seed, number)` is the same in every process.

Three in ten repeat an earlier one, mostly one that is under way: the same request, the same document under another
key, or another document under the same key, of which one must be refused.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from tests.server.killed.asking import Ask

DUPLICATES = 0.3
RECENT = 60
"""most duplicates repeat one of so many requests before"""


@dataclass(frozen=True, slots=True)
class Sent:
    number: int
    first: int
    """the request that it repeats; its own number, if it is new"""
    kind: str
    """new, again, other key, other payload"""

    @property
    def name(self) -> str:
        """Of its document."""
        return f"x-{self.number}" if self.kind == "other payload" else f"d-{self.first}"

    @property
    def key(self) -> str:
        return f"k-{self.number if self.kind in ('new', 'other key') else self.first}"

    @property
    def ask(self) -> Ask:
        words = f"Document {self.name}. " + "Leases run out, fences do not. " * (1 + self.first % 5)
        body = {"doc_id": self.name, "text": words, "metadata": {"state": self.name}}
        return Ask("POST", "/v1/documents", self.key, json.dumps(body).encode(), wants=((self.name, self.name),))


def sent(seed: int, number: int) -> Sent:
    dice = random.Random(f"ragfence/load/{seed}/{number}")
    if number == 0 or dice.random() >= DUPLICATES:
        return Sent(number, number, "new")
    back = dice.randint(1, min(number, RECENT if dice.random() < 0.7 else number))
    first = sent(seed, number - back).first
    return Sent(number, first, dice.choices(("again", "other key", "other payload"), (6, 3, 1))[0])
