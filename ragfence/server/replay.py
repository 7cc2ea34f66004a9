"""Retries are answered before any route is looked up.

A write whose like was read before (see `reading`) asks for its key here, and is answered here if its answer is known.
Only what still has to be performed, waited for or refused goes on to its route, with the key it has asked for.
"""

from __future__ import annotations

from ragfence.server.asgi import App, ClientGone, Message, Receive, Scope, Send, read_body, send_answer
from ragfence.server.dependencies import BEGUN, HEAD
from ragfence.server.load_shedding import READS
from ragfence.wire.messages import Answer


class ReplayMiddleware:
    """Inside of `Gate`, which says who asks, and of `Shedding`, which bounds the body."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = scope.get("state", {}).get("session") if scope["type"] == "http" else None
        if session is None or scope["method"] in READS:
            await self._app(scope, receive, send)
            return
        state, contract = scope["state"], session.contract
        head = state[HEAD] = contract.reading.head_of(scope, state["asker"].principal)
        if not contract.reading.may_know(head):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(receive)
        except ClientGone:
            await self._app(scope, receive, send)
            return
        asked = contract.reading.known(head, body, session.answer_within_s)
        if asked is not None:
            begun = await contract.begin(asked)
            if isinstance(begun, Answer):
                await send_answer(send, begun)
                return
            state[BEGUN] = begun
        try:
            await self._app(scope, _again(body, receive), send)
        finally:
            if (left := state.pop(BEGUN, None)) is not None:
                left.op.let_go()


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return messages.pop() if messages else await receive()

    return receiving
