"""Mutants of webhooks/, and of what the server and the policy do for them."""

from tests.mutants.mutant import Mutant

HOOKS = ("tests/webhooks/test_hooks.py",)
SIGNATURES = ("tests/webhooks/test_signatures.py",)
FORMAT = ("tests/core/test_webhook_format.py",)


def _server(words: str) -> tuple[str, ...]:
    return ("tests/server/test_webhooks.py", "-k", words)


MUTANTS = [
    Mutant(
        "webhooks: an event whose object is busy uses up its attempts",
        "ragfence/engine/claim_block.py",
        "        won.entered = False\n",
        "        pass\n",
        (*HOOKS, "-k", "object_is_busy"),
    ),
    Mutant(
        "webhooks: an event in the inbox whose object is busy is given up",
        "ragfence/queues/consumer.py",
        "elif is_not_started(error):",
        "elif False:",
        (*HOOKS, "-k", "object_is_busy"),
    ),
    Mutant(
        "webhooks: a content type that nobody signed turns JSON into a form",
        "ragfence/webhooks/providers.py",
        'if not delivery.body.startswith(b"payload="):',
        "if False:",
        (*HOOKS, "-k", "read_as_a_form"),
    ),
    Mutant(
        "webhooks: an event without a sequence is applied in any order",
        "ragfence/webhooks/hooks.py",
        "if object_id is None or sequence is None:",
        "if False:",
        (*HOOKS, "-k", "cannot_be_ordered"),
    ),
    Mutant(
        "webhooks: a claim inside the handler that lost its race answers the event as a duplicate",
        "ragfence/webhooks/hooks.py",
        " or not is_about(lost, claim)",
        "",
        (*HOOKS, "-k", "inside_the_handler"),
    ),
    Mutant(
        "webhooks: an unverified body is handled",
        "ragfence/webhooks/signatures.py",
        "self._algorithm) for secret in self._secrets), given):",
        "self._algorithm) for secret in self._secrets), given) and False:",
        _server("not_verified and github"),
    ),
    Mutant(
        "webhooks: signatures are compared with ==",
        "ragfence/webhooks/signatures.py",
        "found |= hmac.compare_digest(one, other)",
        "found |= one == other",
        (*SIGNATURES, "-k", "constant_time"),
    ),
    Mutant(
        "webhooks: old deliveries are accepted",
        "ragfence/webhooks/signatures.py",
        "if abs(now_s - int(timestamp)) > tolerance_s:",
        "if False:",
        (*SIGNATURES, "-k", "tolerance"),
    ),
    Mutant(
        "webhooks: an older sequence is applied",
        "ragfence/webhooks/policy_hooks.py",
        "sequence = None if self._sequence is None else sequence_in(self._sequence, payload)",
        "sequence = None",
        _server("revisions and github"),
    ),
    Mutant(
        "webhooks: an older deletion or update of a deleted document is applied",
        "ragfence/webhooks/policy_hooks.py",
        "documents.retract(doc.doc_id, sequence=doc.sequence, ",
        "documents.retract(doc.doc_id, ",
        _server("deletion"),
    ),
    Mutant(
        "webhooks: a twin in flight is answered with 2xx",
        "ragfence/webhooks/hooks.py",
        '    if isinstance(error, InFlight):\n        return EventResult(event, 503, "in_flight", error=error)',
        '    if isinstance(error, InFlight):\n        return EventResult(event, 200, "in_flight", error=error)',
        (*HOOKS, "-k", "twin"),
    ),
    Mutant(
        "webhooks: one key for a body of several messages",
        "ragfence/webhooks/providers.py",
        'yield text_at(message, "id"), f"message',
        'yield text_at(messages[0], "id"), f"message',
        _server("each_message"),
    ),
    Mutant(
        "webhooks: a missing secret is accepted",
        "ragfence/core/settings.py",
        "    if not value:\n        raise _webhook_refusal(webhook, ",
        "    if False:\n        raise _webhook_refusal(webhook, ",
        _server("without_the_secret"),
    ),
    Mutant(
        "webhooks: a policy without a secret is accepted",
        "ragfence/core/webhook_policy.py",
        'raise PolicyError("has no secret"',
        'PolicyError("has no secret"',
        (*FORMAT, "-k", "cannot_work"),
    ),
    Mutant(
        "webhooks: a secret in place of its name is shown",
        "ragfence/core/webhook_policy.py",
        "must be the name of an environment variable, never the value itself",
        "is not a variable: {name}",
        (*FORMAT, "-k", "not_repeated or wrong_place"),
    ),
    Mutant(
        "webhooks: a missing value deletes",
        "ragfence/core/webhook_format.py",
        "        if value is MISSING:  # a payload of another form must not delete what `!=` was not written for\n"
        "            return False\n",
        "",
        (*FORMAT, "-k", "comparison_holds"),
    ),
    Mutant(
        "webhooks: true is 1",
        "ragfence/core/webhook_format.py",
        "    if isinstance(value, bool) or isinstance(constant, bool):\n        return value is constant\n",
        "",
        (*FORMAT, "-k", "comparison_holds"),
    ),
    Mutant(
        "webhooks: a conflict of the document is answered with 200",
        "ragfence/webhooks/hooks.py",
        '        return EventResult(event, 409, "conflict", receipt=receipt)\n',
        '        return EventResult(event, 200, "conflict", receipt=receipt)\n',
        _server("equal_sequence"),
    ),
    Mutant(
        "webhooks: the text of a document is stored with the key of its event",
        "ragfence/webhooks/policy_hooks.py",
        '"content": digest_part(content, key),',
        '"content": doc.text,',
        _server("with_a_diff"),
    ),
    Mutant(
        "webhooks: an event that can never be handled is accepted into the inbox",
        "ragfence/webhooks/hooks.py",
        "self.compared(event)  # what can never",
        "pass  # what can never",
        _server("durable_before"),
    ),
    Mutant(
        "webhooks: an event that is too long for the inbox is asked for again and again",
        "ragfence/webhooks/hooks.py",
        "            return WebhookReply(413, _problem(error))\n        except RagfenceError",
        '            return WebhookReply(503, _problem(error), {"retry-after": "5"})\n        except RagfenceError',
        _server("durable_before"),
    ),
    Mutant(
        "webhooks: 202 before the event is in the queue",
        "ragfence/webhooks/hooks.py",
        "            inbox.send(envelopes)\n",
        "            pass\n",
        _server("durable_before"),
    ),
    Mutant(
        "webhooks: the server reads more of a body than the webhook accepts",
        "ragfence/server/routes/webhooks.py",
        "if len(body) > hook.rules.max_body_bytes:",
        "if False:",
        _server("too_long and github"),
    ),
    Mutant(
        "webhooks: forged deliveries are not counted",
        "ragfence/server/webhooks.py",
        '        self._on_refused("webhook")\n',
        "",
        _server("not_verified and github"),
    ),
    Mutant(
        "webhooks: forged deliveries are not slowed down",
        "ragfence/server/webhooks.py",
        '        self._throttle.fail(address_of(client), f"the webhook {hook.name} was not verified")\n',
        "",
        _server("slowed_down"),
    ),
    Mutant(
        "webhooks: a provider pays for others behind its proxy",
        "ragfence/server/webhooks.py",
        "        self._trusted[hook.name, address_of(client)] = True\n",
        "        pass\n",
        _server("slowed_down"),
    ),
    Mutant(
        "webhooks: forged deliveries use the quota of the tenant",
        "ragfence/server/routes/webhooks.py",
        "    hooks = await _bound(request, hook, gate)\n",
        "    await request.app.state.quotas.spend(hook.tenant, 1)\n    hooks = await _bound(request, hook, gate)\n",
        _server("quota"),
    ),
    Mutant(
        "webhooks: a phone number is part of a key as it is",
        "ragfence/core/payments.py",
        'return "phone:" + digest("ragfence/phone/1", number.encode()).hex()[:32]',
        'return "phone:" + number',
        (*HOOKS, "-k", "phone"),
    ),
    Mutant(
        "webhooks: 1000 and 1000.00 are two payments",
        "ragfence/core/payments.py",
        'return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"',
        "return text",
        (*HOOKS, "-k", "equal_amounts"),
    ),
    Mutant(
        "webhooks: the inbox shows a stale event as applied",
        "ragfence/audit/deliveries.py",
        "    _mark_unapplied(rows, query, events)\n",
        "",
        ("tests/audit/test_deliveries.py", "-k", "listed_once"),
    ),
]
