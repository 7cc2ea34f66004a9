"""Random sequences of requests, and where the server dies on the way. A seed makes the same sequence every time.

A step is some requests that are sent at the same moment, and it is over when all of them are answered. Within a step,
what is done to one document is the same however often and under whatever keys it is sent, but for two cases in which
the outcome is known as well: two payloads under one key (one of them is applied), and two numbered revisions (the newer
one stays). So the states that a document goes through are known, one after the other, whoever was killed where.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from ragfence.documents.head_moves import AFTER_SNIPPETS
from ragfence.engine.crash_points import HYDRATION_POINTS, OPERATION_POINTS
from ragfence.indexes.aliases import ALIAS_POINTS
from ragfence.indexes.build import BUILD_POINTS
from tests.server.killed.asking import NDJSON, Ask

POINTS = (*OPERATION_POINTS, AFTER_SNIPPETS)
ALIAS = "docs"
BUILT = b"$built"
"""in a swap: the build that was answered last"""

WORDS = [
    "lease",
    "fence",
    "epoch",
    "batch",
    "shard",
    "commit",
    "seal",
    "claim",
    "token",
    "owner",
    "record",
    "segment",
    "store",
    "answer",
    "request",
]


@dataclass(frozen=True, slots=True)
class Kill:
    """The server dies: before the step, so many milliseconds into it, or at the n-th visit of a point."""

    point: str = ""
    times: int = 1
    after_ms: int | None = None

    def __str__(self) -> str:
        if self.point:
            return f"{self.point} #{self.times}"
        return "before" if self.after_ms is None else f"after {self.after_ms} ms"


@dataclass(frozen=True, slots=True)
class Step:
    asks: tuple[Ask, ...]
    kills: tuple[Kill, ...] = ()

    def __str__(self) -> str:
        sent = ", ".join(f"{ask.method} {ask.path.removeprefix('/v1/')} {ask.key}" for ask in self.asks)
        return f"[{'; '.join(map(str, self.kills)) or 'no kill'}] {sent}"


@dataclass(slots=True)
class Plan:
    """`builds`: so often an index is built and an alias swapped, which takes a server some seconds each time."""

    seed: int | str
    steps: int = 7
    builds: int = 0
    documents: int = 4
    _sent: list[Ask] = field(default_factory=list)
    _number: int = 0
    _sequence: int = 0

    def made(self) -> list[Step]:
        dice = random.Random(f"ragfence/killed/{self.seed}")
        steps = [self._step(dice) for _ in range(self.steps)]
        return steps + self._indexing(dice)

    def _step(self, dice: random.Random) -> Step:
        names = [f"d{number}" for number in range(self.documents)]
        dice.shuffle(names)
        asks: list[Ask] = []
        for _ in range(dice.choice((1, 1, 2, 3))):
            asks += self._act(dice, names)
        if self._sent and dice.random() < 0.5:
            asks += dice.sample(self._sent, min(len(self._sent), 2))
        self._sent += dict.fromkeys(ask for ask in asks if ask not in self._sent)
        dice.shuffle(asks)
        return Step(tuple(asks), tuple(_kills(dice, POINTS)))

    def _act(self, dice: random.Random, free: list[str]) -> list[Ask]:
        """What takes place on documents that nobody else has in this step."""
        acts = (self._sends, self._sends, self._same_document, self._conflict, self._retracts, self._batch, self._race)
        return dice.choice(acts)(dice, free) if free else []

    def _sends(self, dice: random.Random, free: list[str]) -> list[Ask]:
        """One request, some times at once."""
        return [self._write(dice, free.pop(), self._key())] * dice.choice((1, 2, 3))

    def _same_document(self, dice: random.Random, free: list[str]) -> list[Ask]:
        """The same document under several keys."""
        name, text, state = free.pop(), _text(dice), self._state()
        return [self._of(name, text, state, self._key(), dice.choice(("POST", "PUT"))) for _ in range(3)]

    def _conflict(self, dice: random.Random, free: list[str]) -> list[Ask]:
        """Another payload under a key, at the same time, or long after it was used."""
        used = [ask for ask in self._sent if ask.method == "POST" and ask.path == "/v1/documents"]
        name = free.pop()
        if used and dice.random() < 0.5:
            return [self._of(name, _text(dice), self._state(), dice.choice(used).key)] * 2
        key = self._key()
        return [self._of(name, _text(dice), self._state(), key) for _ in range(2)] * 2

    def _retracts(self, dice: random.Random, free: list[str]) -> list[Ask]:
        name = free.pop()
        key = self._key()
        return [Ask("DELETE", f"/v1/documents/{name}", key, wants=((name, None),))] * dice.choice((1, 2))

    def _batch(self, dice: random.Random, free: list[str]) -> list[Ask]:
        """Known and new documents, and a line that is none."""
        names = [free.pop() for _ in range(min(len(free), dice.choice((1, 2, 3))))]
        names += [f"n{self._number}-{at}" for at in range(dice.choice((1, 4)))]
        bodies, wants = [], []
        for name in names:
            state = self._state()
            bodies.append(json.dumps(_document(name, _text(dice), state)))
            wants.append((name, state))
        bodies.insert(dice.randrange(len(bodies) + 1), '{"doc_id": "wrong"}')
        body = "\n".join(bodies).encode()
        return [Ask("POST", "/v1/documents:batch", self._key(), body, NDJSON, tuple(wants))] * dice.choice((1, 2))

    def _race(self, dice: random.Random, free: list[str]) -> list[Ask]:
        """Two revisions at once, of a document whose revisions are all numbered: the newer one stays."""
        asks = []
        for _ in range(2):
            self._sequence += 1
            asks.append(self._of("numbered", _text(dice), self._state(), self._key(), sequence=self._sequence))
        return asks

    def _write(self, dice: random.Random, name: str, key: str) -> Ask:
        return self._of(name, _text(dice), self._state(), key, dice.choice(("POST", "PUT")))

    def _of(
        self, name: str, text: str, state: str, key: str, method: str = "POST", *, sequence: int | None = None
    ) -> Ask:
        document = _document(name, text, state)
        if sequence is not None:
            document["sequence"] = sequence
        path = "/v1/documents"
        if method == "PUT":
            del document["doc_id"]
            path += f"/{name}"
        return Ask(method, path, key, json.dumps(document).encode(), wants=((name, state),))

    def _indexing(self, dice: random.Random) -> list[Step]:
        """A document is changed, the index built, and the alias swapped to it; so often."""
        steps = []
        for _ in range(self.builds):
            steps.append(Step((self._write(dice, "d0", self._key()),)))
            build = Ask("POST", "/v1/builds", self._key(), b"{}")
            steps.append(Step((build, build), tuple(_kills(dice, BUILD_POINTS, always=True))))
            body = json.dumps({"index_hash": BUILT.decode()}).encode()
            swap = Ask("POST", f"/v1/aliases/{ALIAS}:swap", self._key(), body, wants=((f"@{ALIAS}", BUILT.decode()),))
            steps.append(Step((swap, swap), tuple(_kills(dice, (*ALIAS_POINTS, *OPERATION_POINTS), always=True))))
        return steps

    def _key(self) -> str:
        self._number += 1
        return f"key-{self._number}"

    def _state(self) -> str:
        self._number += 1
        return f"s{self._number}"


def _kills(dice: random.Random, points: tuple[str, ...], *, always: bool = False) -> Iterator[Kill]:
    for _ in range(dice.choice((1, 1, 1, 2) if always else (0, 0, 1, 1, 1, 2))):
        how = dice.random()
        if how < 0.1:
            yield Kill()
        elif how < 0.4:
            yield Kill(after_ms=dice.randrange(60))
        elif how < 0.45:
            yield Kill(dice.choice(HYDRATION_POINTS))
        else:
            yield Kill(dice.choice(points), dice.choice((1, 1, 2, 3)))


def _document(name: str, text: str, state: str) -> dict[str, object]:
    return {"doc_id": name, "text": text, "metadata": {"state": state}}


def _text(dice: random.Random) -> str:
    """Of few paragraphs, so that revisions share some of them, and some documents come twice."""
    paragraphs = [" ".join([WORDS[at], *WORDS] * 2) for at in range(len(WORDS))]
    return "\n\n".join(dice.sample(paragraphs, dice.choice((1, 2, 3))))
