"""Calls to Redis, with errors in our words: scripts that a server forgot are loaded again, and what a policy wants
confirmed is confirmed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from ragfence.errors import StoreUnavailable
from ragfence.stores.redis.connection import Link, PendingExchange, RedisCall, RedisExchange
from ragfence.stores.redis.replies import REDIS_ERRORS, Command, in_our_words, understood
from ragfence.stores.redis.requirements import Confirmation
from ragfence.stores.redis.scripts import Script

Needed = Callable[[list[Any]], bool]
"""Whether these replies count only once they are confirmed."""


def always(_: list[Any]) -> bool:
    return True


class RedisCalls:
    def __init__(self, link: Link, scripts: Mapping[str, Script], confirm: Confirmation) -> None:
        self.link = link
        self.scripts = scripts
        self._confirm = confirm
        self.waits_for = (confirm.command,) if confirm.command else ()

    def exchange(self, calls: Sequence[RedisCall]) -> list[Any]:
        with understood(self.link.url):
            return _accepted(self.link.exchange(calls))

    def begin(self, calls: Sequence[RedisCall]) -> PendingExchange:
        """Plain commands whose effects count once they are confirmed, for `end`."""
        with understood(self.link.url):
            return self.link.begin(calls, self.waits_for)

    def end(self, begun: PendingExchange) -> list[Any]:
        with understood(self.link.url):
            done = begun.end()
            replies = _accepted(done)
        if self.waits_for:
            self._refuse_unconfirmed(done.after)
        return replies

    def called(self, script: Script, calls: Sequence[RedisCall], confirm: Needed | None = None) -> list[Any]:
        (replies,) = self.in_parts(script, [calls], confirm)
        return replies

    def in_parts(
        self, script: Script, parts: Iterable[Sequence[RedisCall]], confirm: Needed | None = None
    ) -> Iterator[list[Any]]:
        """The replies to each part: made, sent and read while the servers work on the others."""
        after = self.waits_for if confirm else ()
        kept: list[Sequence[RedisCall]] = []

        def made() -> Iterator[Sequence[RedisCall]]:
            for calls in parts:
                kept.append(calls)
                yield calls

        with contextlib.closing(self.link.stream(made(), after)) as exchanges:
            try:
                for at, done in enumerate(exchanges):
                    if any(isinstance(reply, NoScriptError) for reply in done.replies):
                        done = self._repeat_unknown(script, kept[at], done, after)
                    replies = _accepted(done)
                    if after and confirm and confirm(replies):
                        self._refuse_unconfirmed(done.after)
                    yield replies
            except REDIS_ERRORS as error:
                raise in_our_words(self.link.url, error) from error

    def _repeat_unknown(
        self, script: Script, calls: Sequence[RedisCall], done: RedisExchange, after: Sequence[Command]
    ) -> RedisExchange:
        """Loads the script where it is unknown and repeats the calls that were refused: no others, which were made."""
        refused = [at for at, reply in enumerate(done.replies) if isinstance(reply, NoScriptError)]
        again = [calls[at] for at in refused]
        self.link.exchange(self._loads(script, again))
        replies, answers = self.link.exchange(again, after)
        for at, reply, answer in zip(refused, replies, answers, strict=True):
            done.replies[at], done.after[at] = reply, answer
        return done

    def _loads(self, script: Script, calls: Sequence[RedisCall]) -> list[RedisCall]:
        """A server that does not know one script knows none, and gets all; those of a cluster get the one they lack."""
        if self.link.clustered:
            return [RedisCall(call.shard, script.load) for call in calls]
        return [RedisCall(calls[0].shard, each.load) for each in self.scripts.values()]

    def _refuse_unconfirmed(self, answers: Sequence[Sequence[Any]]) -> None:
        for (reply,) in answers:
            if isinstance(reply, Exception):
                raise in_our_words(self.link.url, reply) from reply
            if missing := self._confirm.missing(reply):
                raise StoreUnavailable(
                    f"{self.link.url} has the seal, but {missing} did not confirm it within"
                    f" {self._confirm.timeout_ms} ms",
                    hint="check the replicas and durability: in the policy, then try again",
                )


def _accepted(done: RedisExchange) -> list[Any]:
    for reply in done.replies:
        if isinstance(reply, Exception):
            raise reply
    return done.replies
