"""Mutants of consumers and relays that only a killed or frozen process shows."""

from tests.mutants.mutant import Mutant

KILLED = "tests/queues/test_consumer_killed.py"
RELAYS = "tests/outbox/test_relay_killed.py"

MUTANTS = [
    Mutant(
        "events: a message is acknowledged before its outcome is sealed",
        "ragfence/queues/consumer.py",
        "                if claim.is_new:\n                    seal(claim, self._call(message))\n",
        "                if claim.is_new:\n                    self._transport.ack([message])\n"
        "                    seal(claim, self._call(message))\n",
        (KILLED, "-k", "wherever_a_consumer_is_killed and after_effect and streams"),
    ),
    Mutant(
        "events: an inbox forgets what it applied",
        "ragfence/outbox/inbox.py",
        "        if added is not None:\n            return True\n",
        "        return True\n",
        (KILLED, "-k", "wherever_a_consumer_is_killed and after_effect and streams"),
    ),
    Mutant(
        "events: a frozen relay keeps its locks",
        "ragfence/outbox/relay.py",
        '        tx.execute(sa.text(f"SET LOCAL idle_in_transaction_session_timeout = {timeout_ms}"))\n',
        "",
        (RELAYS, "-k", "frozen and postgres"),
    ),
    Mutant(
        "events: a relay does not keep its transaction while a batch takes long",
        "ragfence/outbox/relay.py",
        "            self._locks.execute(sa.select(1))\n",
        "",
        (RELAYS, "-k", "longer_than_one_call"),
    ),
]
