"""Mutants of outbox/ and notify/."""

from tests.mutants.mutant import Mutant

RACE = ("tests/outbox/test_relay.py", "-k", "expired_lease")

MUTANTS = [
    Mutant(
        "relay: a claim inside the function that lost its race marks the event as sent",
        "ragfence/outbox/relay.py",
        " or not is_about(lost, claim)",
        "",
        ("tests/outbox/test_relay.py", "-k", "inside_the_function and sqlite"),
    ),
    Mutant(
        "outbox: events are marked before they are published",
        "ragfence/outbox/relay.py",
        "            outcome = self._publish(rows)\n            report",
        "            every = _Outcome()\n            every.sent = [row.id for row in rows]\n"
        '            self._outbox.run("mark", lambda tx: self._mark(tx, rows, every))\n'
        "            outcome = self._publish(rows)\n            report",
        ("tests/outbox/test_relay.py", "-k", "sqlite and killed_between"),
    ),
    Mutant(
        "outbox: a dead row does not block its key",
        "ragfence/outbox/relay.py",
        "            older.c.state.in_((PENDING, DEAD)),",
        "            older.c.state == PENDING,",
        ("tests/outbox/test_outbox.py", "-k", "sqlite and dead_event"),
    ),
    Mutant(
        "outbox: a dead row does not block what follows an older one",
        "ragfence/outbox/relay.py",
        "        if row.state == DEAD:",
        "        if False:",
        ("tests/outbox/test_relay.py", "-k", "sqlite and appears_later"),
    ),
    Mutant(
        "outbox: two relays take one key",
        "ragfence/outbox/relay.py",
        "            where=sa.or_(leases.c.owner == self._owner, leases.c.until_ms <= moment),\n",
        "",
        RACE,
    ),
    Mutant(
        "outbox: a relay that lost its lease goes on",
        "ragfence/outbox/relay.py",
        "            if not self._still_ours():",
        "            if False:",
        ("tests/outbox/test_relay.py", "-k", "lost_its_lease"),
    ),
    Mutant(
        "outbox: an outage uses up attempts",
        "ragfence/outbox/relay.py",
        "counted=False)",
        "counted=True)",
        ("tests/outbox/test_relay.py", "-k", "sqlite and outage"),
    ),
    Mutant(
        "outbox: one refused event holds up its batch",
        "ragfence/outbox/relay.py",
        "            self._one_by_one(rows, lambda row: queue.send([self._envelope(row)]), outcome)",
        "            outcome.failures = {row.id: _Failure(ValueError()) for row in rows}",
        ("tests/outbox/test_relay.py", "-k", "sqlite and refuses_does_not"),
    ),
    Mutant(
        "outbox: blocked events hide those behind them",
        "ragfence/outbox/relay.py",
        "        rows = self._take_among(tx, None)",
        "        rows = self._take_among(tx, WINDOW * self._batch)",
        ("tests/outbox/test_relay.py", "-k", "sqlite and many_blocked"),
    ),
    Mutant(
        "outbox: a revived key stays in quarantine",
        "ragfence/outbox/relay.py",
        "            if row.attempts or release is None or not release(operation):",
        "            if True:",
        ("tests/outbox/test_relay.py", "-k", "sqlite and revived"),
    ),
    Mutant(
        "notify: announced before sent",
        "ragfence/notify/notifier.py",
        "                error = self._deliver(one)\n",
        "                self._mark(pending)\n                self._save()\n"
        "                error = self._deliver(one)\n",
        ("tests/notify/test_notifier.py", "-k", "killed_anywhere and 1-notify_saved or refused_holds_up"),
    ),
    Mutant(
        "notify: an epoch announces everything again",
        "ragfence/notify/feeds.py",
        "                if known is not None and row.fence <= known:",
        "                if known is not None and row.fence <= known and name in state.segments:",
        ("tests/notify/test_notifier.py", "-k", "epoch_announces and compact"),
    ),
    Mutant(
        "notify: what was rewritten by an earlier epoch is announced again",
        "ragfence/notify/feeds.py",
        "                    continue  # announced in an earlier epoch, and rewritten since",
        "                    pass",
        ("tests/notify/test_notifier.py", "-k", "epoch_announces"),
    ),
    Mutant(
        "notify: the rest of an epoch is lost",
        "ragfence/notify/feeds.py",
        "        listed = [*self._epochs.named_in(self._next), *self._epochs.committed_in(self._next)]",
        "        listed = self._epochs.committed_in(self._next)",
        ("tests/notify/test_notifier.py", "-k", "epoch_announces and hydrate"),
    ),
    Mutant(
        "notify: what a new epoch may void is announced",
        "ragfence/notify/feeds.py",
        "        if self._epochs.newer_than(state.epoch if self._next is None else self._next):",
        "        if False:",
        ("tests/notify/test_notifier.py", "-k", "may_void"),
    ),
    Mutant(
        "notify: a refused event is passed over by later ones of its source",
        "ragfence/notify/notifier.py",
        "                if down or one.source in blocked:",
        "                if down:",
        ("tests/notify/test_notifier.py", "-k", "refused_holds_up"),
    ),
    Mutant(
        "notify: an overtaken memory is written all the same",
        "ragfence/notify/memory.py",
        "            return False\n        self._number += 1",
        "            pass\n        self._number += 1",
        ("tests/notify/test_notifier.py", "-k", "overtaken"),
    ),
]
