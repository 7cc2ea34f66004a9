"""One sequence: the requests are sent, the server dies where the plan says, and everything is sent once more."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from tests.chaos.crew import Nursery, stopping
from tests.server.killed.asking import Ask, Client, Notes, Reply
from tests.server.killed.judge import Verdict, judge
from tests.server.killed.places import Forked, Place
from tests.server.killed.sequences import BUILT, Kill, Plan, Step

MOST_AT_ONCE = 16


def run(plan: Plan, place: Place, nursery: Nursery, *, told: Callable[[str], None] = print) -> Verdict:
    """`told` gets the seed and the steps, so that a failure can be repeated."""
    steps = plan.made()
    told(f"seed {plan.seed}")
    for number, step in enumerate(steps):
        told(f"  {number}: {step}")
    server = Forked(nursery, place)
    notes = Notes()
    sequence = _Sequence(server, notes)
    try:
        server.start()
        server.wait_listening()
        for step in steps:
            sequence.perform(step)
        sequence.once_more()
    finally:
        server.end()
    found = judge(place, sequence.performed, notes)
    found.kills = sequence.kills
    return found


class _Sequence:
    def __init__(self, server: Forked, notes: Notes) -> None:
        self._server, self._notes = server, notes
        self.performed: list[Step] = []
        self.kills = 0
        self._built = b""

    def perform(self, step: Step) -> None:
        step = replace(step, asks=tuple(map(self._resolved, step.asks)))
        self.performed.append(step)
        kills = list(step.kills)
        while kills and not kills[0].point and kills[0].after_ms is None:
            kills.pop(0)
            self._kill()
            self._restart()
        self._send(step.asks, kills)

    def once_more(self) -> None:
        """Killed in quiet, then everything is sent again: whatever was answered must be answered alike."""
        self._kill()
        self._restart()
        self._send(list(dict.fromkeys(ask for step in self.performed for ask in step.asks)), [])

    def _send(self, asks: Sequence[Ask], kills: list[Kill]) -> None:
        began = time.monotonic()
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            due = self._armed(kills)
            sent: list[Future[Reply | None]] = [pool.submit(self._answered, ask) for ask in asks]
            while not all(each.done() for each in sent):
                if due is not None and time.monotonic() - began >= due:
                    due = None
                    self._kill()
                if self._server.status is not None:
                    self._restart()
                    began = time.monotonic()
                    due = self._armed(kills)
                time.sleep(0.002)
            self._server.spring_trap()
            for each in sent:
                each.result()
        if self._server.status is not None:
            self._restart()

    def _armed(self, kills: list[Kill]) -> float | None:
        """Sets the next trap, or says how many seconds from now the server is to be killed."""
        self._server.spring_trap()
        while kills:
            kill = kills.pop(0)
            if kill.point:
                self._server.set_trap(kill.point, kill.times)
                return None
            if kill.after_ms is not None:
                return kill.after_ms / 1000
        return None

    def _answered(self, ask: Ask) -> Reply | None:
        client = Client(self._server.port, self._server.token, self._notes)
        try:
            reply = client.answered(ask, stopped=stopping.is_set)
        finally:
            client.close()
        if reply is not None and ask.path == "/v1/builds" and reply.status < 300:
            self._built = json.loads(reply.body)["index_hash"].encode()
        return reply

    def _resolved(self, ask: Ask) -> Ask:
        """A swap names the build that was answered last."""
        if BUILT not in ask.body:
            return ask
        wants = tuple((name, self._built.decode()) for name, _ in ask.wants)
        return replace(ask, body=ask.body.replace(BUILT, self._built), wants=wants)

    def _kill(self) -> None:
        if self._server.status is None:
            self._server.kill()

    def _restart(self) -> None:
        self._server.spring_trap()
        if self._server.status != -signal.SIGKILL:
            self._notes.problems.append(f"the server ended with {self._server.status}: {self._server.said}")
        self.kills += 1
        self._server.start()
        self._server.wait_listening()
