"""`ragfence consume`, `enqueue` and `queue`: messages of a queue, handled once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Stores, Yes
from ragfence.core.urls import show_url
from ragfence.errors import QueueFull, RagfenceError, TransportUnavailable, ValidationError

if TYPE_CHECKING:
    from ragfence.fence import Fence
    from ragfence.queues.loop import MessageLoop
    from ragfence.queues.transport import DeadLetter, Envelope, Transport

queue = typer.Typer(no_args_is_help=True, help="Show a queue, and decide about its dead letters.")
dead = typer.Typer(no_args_is_help=True, help="List dead letters, put them back, or delete them.")
queue.add_typer(dead, name="dead")

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="The queue: sqlite:///queue.db?queue=NAME, postgresql://..., redis://... or sqs://NAME"
    ),
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="The ids of the messages.")]
Every = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]

SENT_AT_ONCE = 500
PAGE = 500
REASON_CHARACTERS = 200


def consume(
    url: Url,
    *,
    stores: Stores,
    as_json: Json = False,
    documents: Annotated[
        bool,
        typer.Option("--documents", help="Ingest each message as a document, or retract the document that it names."),
    ] = False,
    s3_events: Annotated[
        bool, typer.Option("--s3-events", help="Ingest objects created in a bucket, and retract removed ones.")
    ] = False,
    handler: Annotated[
        str | None,
        typer.Option(
            "--handler", metavar="MODULE:FUNCTION", help="Call this function, sync or async, with each message."
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="With --s3-events: put this in front of every doc_id.")
    ] = "",
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Exit when no more messages arrive.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Exit after this many messages.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", metavar="N", min=1, max=256, help="How many messages --handler handles at the same time."
        ),
    ] = 1,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", min=1, max=10_000, help="How many messages to receive at once."),
    ] = None,
    max_attempts: Annotated[
        int,
        typer.Option(
            "--max-attempts", metavar="N", min=1, help="After this many deliveries, a failing message is a dead letter."
        ),
    ] = 5,
    visibility: Annotated[
        float | None,
        typer.Option(
            "--visibility", metavar="SECONDS", min=1, help="How long a received message is hidden from others."
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option("--quota", metavar="QUOTA", help="Limit for each tenant, such as 600/minute; may be repeated."),
    ] = None,
    metrics: Annotated[
        int | None,
        typer.Option("--metrics", metavar="PORT", min=0, max=65535, help="Serve metrics on this port of 127.0.0.1."),
    ] = None,
) -> None:
    """Handle the messages of a queue, each once, until SIGTERM or Ctrl-C.

    When it is stopped, messages in progress are finished, and the rest are put back. With --until-empty or --limit, the
    command exits with 1 if messages became dead letters.
    """
    if sum((documents, s3_events, handler is not None)) != 1:
        raise ValidationError(
            "choose what to do with the messages", hint="--documents, --s3-events, or --handler MODULE:FUNCTION"
        )
    function = _function(handler) if handler is not None else None
    with contextlib.ExitStack() as stack:
        transport = stack.enter_context(_opened(url, visibility))
        fence = stack.enter_context(_fence_of(stores, metrics))
        options: dict[str, Any] = {"max_attempts": max_attempts, "wait_s": 1.0 if until_empty else 5.0}
        if batch is not None:
            options["batch"] = batch
        if quota:
            from ragfence.server.quotas import TenantQuotas

            quotas = TenantQuotas(quota, stores.fences_location)
            stack.callback(quotas.close)
            options["admit"] = quotas.admit
        show = stack.enter_context(output.progress(f"consuming {output.plain(transport.name)}"))
        consumer: MessageLoop
        options["on_result"] = lambda *_: show(consumer.counts.total())
        if function is not None:
            from ragfence.queues import Consumer

            consumer = Consumer(fence, transport, function, workers=workers, **options)
        elif documents:
            from ragfence.queues import DocumentConsumer

            consumer = DocumentConsumer(fence, transport, **options)
        else:
            from ragfence.queues import s3_consumer

            consumer = s3_consumer(fence, transport, prefix=prefix, **options)
        if metrics is not None:
            stack.enter_context(_served_metrics(metrics))
        started = time.monotonic()
        consumer.run(until_empty=until_empty, limit=limit)
        seconds = time.monotonic() - started
        named = {"queue": transport.name, "url": transport.url}
    _print_results(named, consumer.counts, seconds, as_json=as_json)
    if consumer.counts["dead"] and not as_json:
        output.suggest(f"`ragfence queue dead list '{show_url(url)}'` shows the reasons")
    if consumer.counts["dead"] and (until_empty or limit is not None):
        raise typer.Exit(1)


def enqueue(
    url: Url,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file with one JSON value per line.")],
    *,
    as_json: Json = False,
    documents: Annotated[
        bool, typer.Option("--documents", help="Check that every line is a document, before any is sent.")
    ] = False,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant of the messages.")] = "",
    route: Annotated[str, typer.Option("--route", metavar="TEXT", help="The route in decision rows.")] = "",
    from_line: Annotated[
        int, typer.Option("--from-line", metavar="N", min=1, help="Begin with this line, to continue an earlier run.")
    ] = 1,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait while the queue is full.")
    ] = 0.0,
) -> None:
    """Send each line of a file as a message. The whole file is checked before the first line is sent."""
    try:
        for _ in _envelopes(file, from_line, tenant, route, check_documents=documents):
            pass
    except ValidationError as wrong:
        wrong.message += "; nothing was sent"
        raise
    sent, line = 0, from_line - 1
    give_up_at = time.monotonic() + wait
    with _opened(url) as transport, output.progress("sending") as show:
        page: list[Envelope] = []
        try:
            for number, envelope in _envelopes(file, from_line, tenant, route, check_documents=False):
                page.append(envelope)
                if len(page) == SENT_AT_ONCE:
                    _send(transport, page, give_up_at)
                    sent, line, page = sent + len(page), number, []
                    show(sent)
            if page:
                _send(transport, page, give_up_at)
                sent += len(page)
        except RagfenceError as error:
            if sent:
                error.message += f"; {output.pluralize(sent, 'message')} up to line {line} were sent"
            if isinstance(error, QueueFull | TransportUnavailable):
                error.hint = f"later, continue with --from-line {line + 1}; consumers ingest a document once"
            raise
        named = {"queue": transport.name, "url": transport.url}
    if as_json:
        output.print_json({**named, "sent": sent})
    else:
        output.echo(f"sent {output.pluralize(sent, 'message')} to {named['queue']}")


@queue.command("status")
def status(url: Url, *, as_json: Json = False) -> None:
    """Show how many messages wait, are being handled, and are dead letters."""
    with _opened(url) as transport:
        depth = transport.depth()
        if as_json:
            output.print_json(
                {
                    "queue": transport.name,
                    "url": transport.url,
                    "visible": depth.visible,
                    "in_flight": depth.in_flight,
                    "dead": depth.dead,
                    "oldest_age_s": depth.oldest_age_s,
                }
            )
            return
        listing = output.Listing(output.out(), "queue", *(output.Column(name, right=True) for name in _DEPTH))
        age = "-" if depth.oldest_age_s is None else output.span(depth.oldest_age_s * 1000)
        listing.add(transport.name, f"{depth.visible:,}", f"{depth.in_flight:,}", f"{depth.dead:,}", age)
        listing.print()
        if depth.dead:
            output.suggest(f"`ragfence queue dead list '{show_url(url)}'` shows the dead letters and their reasons")


_DEPTH = ("waiting", "in flight", "dead", "oldest")


@dead.command("list")
def list_dead(
    url: Url,
    *,
    as_json: Json = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Show at most this many; 0 for all.")] = 100,
) -> None:
    """List dead letters with their reasons, the oldest first. With --json, one line per letter."""
    with _opened(url) as transport:
        console = output.out()
        listing = output.Listing(
            console, output.Column("id", whole=True), output.Column("died", wide=True), "source", "reason"
        )
        count = 0
        for letter in _letters(transport, limit):
            count += 1
            message = letter.message
            if as_json:
                output.print_json(_letter(letter))
                continue
            died = output.time_cell(letter.died_ms, console=console) if letter.died_ms else "-"
            listing.add(message.message_id, died, _source(letter), letter.reason[:REASON_CHARACTERS])
        if not as_json and count:
            listing.print()
        elif not as_json:
            output.echo(f"{transport.name} has no dead letters")


@dead.command("replay")
def replay_dead(url: Url, ids: Ids = None, *, every: Every = False, as_json: Json = False) -> None:
    """Put dead letters back into the queue, with their attempts reset."""
    with _opened(url) as transport:
        replayed = _decide(transport, ids, every, transport.replay_dead)
        _print_decided(transport, "replayed", replayed, ids, as_json=as_json)


@dead.command("drop")
def drop_dead(url: Url, ids: Ids = None, *, every: Every = False, as_json: Json = False, yes: Yes = False) -> None:
    """Delete dead letters. They cannot be brought back."""
    with _opened(url) as transport:
        _check_choice(ids, every)
        count = transport.depth().dead if every else len(ids or ())
        if not yes and count:
            question = f"delete {output.pluralize(count, 'dead letter')} of {output.plain(transport.name)}?"
            output.confirm_deletion(question, as_json=as_json)
        dropped = _decide(transport, ids, every, transport.drop_dead)
        _print_decided(transport, "dropped", dropped, ids, as_json=as_json)


@contextlib.contextmanager
def _opened(url: str, visibility_s: float | None = None) -> Iterator[Transport]:
    from ragfence.queues import open_transport

    options = {} if visibility_s is None else {"visibility_s": visibility_s}
    transport = open_transport(url, **options)
    try:
        yield transport
    finally:
        transport.close()


@contextlib.contextmanager
def _fence_of(stores: Any, metrics: int | None) -> Iterator[Fence]:
    """The fence of a worker. It creates the embedded stores, as `ragfence serve` does."""
    import ragfence

    observe = None
    if metrics is not None:
        observe = [*filter(None, os.environ.get("RAGFENCE_OBSERVE", "").split(",")), "metrics"]
    with ragfence.open(
        stores.store, objects=stores.objects, tenant=stores.tenant, policy=stores.policy, observe=observe
    ) as fence:
        yield fence


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValidationError(f"--handler {name!r} is not MODULE:FUNCTION", hint="for example --handler orders:handle")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = getattr(import_module(module), function)
    except ModuleNotFoundError as missing:
        if missing.name is not None and not module.startswith(missing.name):
            raise
        raise ValidationError(
            f"--handler: there is no module {module!r}", hint="run the command in the folder of the module"
        ) from None
    except AttributeError:
        raise ValidationError(f"--handler: {module} has no {function!r}") from None
    if not callable(found):
        raise ValidationError(f"--handler: {name} is not a function")
    return found  # type: ignore[no-any-return]  # the module is the caller's


@contextlib.contextmanager
def _served_metrics(port: int) -> Iterator[None]:
    from ragfence._extras import needs_extra

    with needs_extra("audit", "--metrics"):
        from prometheus_client import start_http_server
    try:
        server, thread = start_http_server(port, addr="127.0.0.1")
    except OSError as refused:
        raise ValidationError(
            f"--metrics: port {port} cannot be used: {refused.strerror}", hint="choose another port; 0 is any free one"
        ) from None
    output.err().print(f"metrics: http://127.0.0.1:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _print_results(named: dict[str, str], counts: Any, seconds: float, *, as_json: bool) -> None:
    if as_json:
        output.print_json({**named, "results": dict(counts), "messages": counts.total(), "seconds": round(seconds, 3)})
        return
    total = counts.total()
    output.echo(f"{named['queue']}: {output.pluralize(total, 'message')} in {output.span(seconds * 1000)}")
    if total:
        listing = output.Listing(output.out(), "result", output.Column("messages", right=True), "")
        for result, count in counts.most_common():
            listing.add(result, f"{count:,}", _MEANINGS.get(result, " "))
        listing.print()


_MEANINGS = {
    "duplicate": "handled before",
    "stale": "older than what was handled before",
    "retried": "failed; will come again",
    "in_flight": "put back: handled elsewhere",
    "throttled": "put back: over the quota",
    "postponed": "put back: a store did not answer",
    "returned": "put back: the command was stopped",
    "dead": "dead letters",
}


def _envelopes(
    file: str, from_line: int, tenant: str, route: str, *, check_documents: bool
) -> Iterator[tuple[int, Envelope]]:
    """Yields (number, envelope) of every line that is not blank."""
    from ragfence.queues.transport import MAX_BODY_BYTES, Envelope, encode_body

    try:
        with open(file, "rb") as lines:
            number = 0
            # Escaped in JSON, a character may take several times its bytes.
            while line := lines.readline(8 * MAX_BODY_BYTES):
                number += 1
                if number < from_line or not line.strip():
                    continue
                try:
                    body = json.loads(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                    encode_body(body)
                    if check_documents:
                        _check_document(body)
                except ValidationError as wrong:
                    raise ValidationError(f"line {number} of {file}: {wrong.message}", hint=wrong.hint) from None
                except (ValueError, RecursionError) as wrong:
                    raise ValidationError(
                        f"line {number} of {file} is not valid JSON: {wrong}",
                        hint='write one JSON value per line, such as {"doc_id": "a", "text": "..."}',
                    ) from None
                yield number, Envelope(body=body, tenant=tenant, route=route)
    except OSError as refused:
        raise ValidationError(f"{file} cannot be read: {refused.strerror}") from None


def _check_document(body: Any) -> None:
    from ragfence.queues.document_consumer import document_of
    from ragfence.queues.transport import Message
    from ragfence.wire.problems import RequestRefused

    try:
        document_of(Message(body=body, message_id="", handle=""))
    except RequestRefused as refused:
        raise ValidationError(f"it is not a document: {refused.problem.detail}") from None


def _send(transport: Transport, envelopes: Sequence[Envelope], give_up_at: float) -> None:
    while True:
        try:
            transport.send(envelopes)
        except QueueFull as full:
            pause_s = (full.retry_after_ms or 1000) / 1000
            if time.monotonic() + pause_s > give_up_at:
                raise
            time.sleep(pause_s)
        else:
            return


def _letters(transport: Transport, limit: int) -> Iterator[DeadLetter]:
    after, left = "", limit or sys.maxsize
    while left and (page := transport.dead_letters(min(PAGE, left), after)):
        yield from page
        after, left = page[-1].message.message_id, left - len(page)


def _letter(letter: DeadLetter) -> dict[str, Any]:
    message = letter.message
    names = ("message_id", "event_id", "source_id", "revision", "index_hash", "dedupe_key", "tenant", "route")
    values = {name: getattr(message, name) for name in names}
    return values | {
        "attempt": message.attempt,
        "reason": letter.reason,
        "died_at": output.iso(letter.died_ms),
        "body": message.body,
    }


def _source(letter: DeadLetter) -> str:
    body = letter.message.body
    named = body.get("doc_id") if isinstance(body, dict) else None
    return str(letter.message.source_id or named or letter.message.event_id)


def _check_choice(ids: Sequence[str] | None, every: bool) -> None:
    if bool(ids) == every:
        raise ValidationError(
            "give either ids or --all, not both" if every else "which dead letters? Give their ids, or --all",
            hint="`ragfence queue dead list URL` shows the ids",
        )


def _decide(transport: Transport, ids: Sequence[str] | None, every: bool, act: Callable[[list[str]], int]) -> int:
    _check_choice(ids, every)
    if ids:
        return act(list(ids))
    # Those that are there now: one that dies again meanwhile is not replayed for ever.
    known = [letter.message.message_id for letter in _letters(transport, 0)]
    return sum(act(known[at : at + PAGE]) for at in range(0, len(known), PAGE))


def _print_decided(transport: Transport, verb: str, count: int, ids: Sequence[str] | None, *, as_json: bool) -> None:
    missing = len(set(ids)) - count if ids else 0
    if as_json:
        output.print_json({"queue": transport.name, verb: count, "unknown": missing})
    else:
        output.echo(f"{verb} {output.pluralize(count, 'dead letter')} of {transport.name}")
        if missing:
            output.err().print(f"{output.pluralize(missing, 'id')} not among the dead letters")
    if missing:
        raise typer.Exit(1)
