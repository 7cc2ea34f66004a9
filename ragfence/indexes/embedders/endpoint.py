"""Embeddings of any OpenAI-compatible HTTP endpoint: OpenAI, vLLM, Ollama, text-embeddings-inference, LiteLLM ...

Texts go out in requests of a limited number and size, some at the same time; vectors come back in the order of the
texts, whatever order the answer has. What may pass (see retrying.py) is tried again; everything else fails at once and
says what the server said. The API key is in no name, message or repr.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from ragfence.core.backoff import Backoff, may_pass, retry_after_s
from ragfence.core.http_errors import message_in
from ragfence.documents.log import estimated_tokens
from ragfence.errors import EmbedderInvalid, EmbedderUnavailable, RagfenceError, ValidationError
from ragfence.indexes.embedders.packages import import_package

if TYPE_CHECKING:
    import httpx

    from ragfence.indexes.embedders.embedder import Vectors

INSTALL = "ragfence[openai]"
OPENAI = "https://api.openai.com/v1"
PROBE = "How many dimensions?"


class EndpointEmbedder:
    """`open_embedder("openai:text-embedding-3-small")`, `open_embedder("openai+http://127.0.0.1:8000/v1#my-model")`.

    url                      what comes before /embeddings
    dimension                not given: asked once, with a text of four words
    revision                 not given: the model's name. Nobody can see from outside that a server got other weights
                             under the same name: set it, and change it with them
    api_key                  not given: OPENAI_API_KEY, if that is set
    batch                    texts in one request, at most
    max_tokens_per_request   estimated (bytes / 4); a text above it goes alone
    concurrency              requests at the same time, over all threads
    timeout_s                for each attempt: to connect, and between two parts of the answer
    attempts                 before a request is given up with EmbedderUnavailable
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        dimension: int | None = None,
        revision: str = "",
        api_key: str | None = None,
        batch: int = 128,
        max_tokens_per_request: int = 100_000,
        concurrency: int = 4,
        timeout_s: float = 60.0,
        attempts: int = 6,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 60.0,
        normalised: bool = False,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.url = _checked_url(url)
        if not model:
            raise ValidationError("an endpoint needs the name of a model", hint="openai+<url>#<model>")
        if batch < 1 or max_tokens_per_request < 1 or concurrency < 1 or timeout_s <= 0:
            raise ValidationError("batch, max_tokens_per_request, concurrency and timeout_s are above 0")
        self.model = model
        self.name = f"openai:{model}" if self.url == OPENAI else f"openai+{self.url}#{model}"
        self.revision = revision or model
        self.normalised = normalised
        self.batch = batch
        self.max_tokens_per_request = max_tokens_per_request
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.backoff = Backoff(attempts, first_pause_s, longest_pause_s)
        self._key = _checked_key(api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", ""))
        self._sleep = sleep
        self._dice = random.Random()
        self._dimension = dimension
        self._answering = ""
        self._probing = threading.Lock()
        self._learning = threading.Lock()
        self._fresh(os.getpid())

    @property
    def dimension(self) -> int:
        with self._probing:
            if self._dimension is None:
                self._asked([PROBE], threading.Event())  # every answer teaches it
            assert self._dimension is not None
            return self._dimension

    @dimension.setter
    def dimension(self, value: int) -> None:
        self._dimension = value  # a plain attribute in the protocol

    def embed(self, texts: Sequence[str]) -> Vectors:
        import numpy as np

        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        requests = list(self._requests(texts))
        stop = threading.Event()
        if len(requests) == 1:
            return self._asked(requests[0], stop)
        with ThreadPoolExecutor(min(self.concurrency, len(requests)), "ragfence-embed") as pool:
            asked = [pool.submit(self._asked, request, stop) for request in requests]
            try:
                done, _ = wait(asked, return_when=FIRST_EXCEPTION)
                failed = [error for future in done if (error := future.exception())]
            finally:
                # Whether one failed or somebody pressed ctrl-C: nobody pays for answers that no one will read.
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise failed[0]
        return np.concatenate([future.result() for future in asked])

    def close(self) -> None:
        self._client.close()

    def __repr__(self) -> str:
        return f"EndpointEmbedder({self.url!r}, {self.model!r}, revision={self.revision!r})"

    def _requests(self, texts: Sequence[str]) -> Iterator[list[str]]:
        request: list[str] = []
        tokens = 0
        for text in texts:
            # OpenAI refuses an empty text, and with it all that came along; a space is the nearest thing it takes.
            text = text or " "
            size = estimated_tokens(text)
            if request and (len(request) >= self.batch or tokens + size > self.max_tokens_per_request):
                yield request
                request, tokens = [], 0
            request.append(text)
            tokens += size
        if request:
            yield request

    def _asked(self, texts: list[str], stop: threading.Event) -> Vectors:
        """The vectors of one request, however often it has to be sent."""
        if self._process != os.getpid():
            self._fresh(os.getpid())
        body = {"model": self.model, "input": texts, "encoding_format": "float"}
        with self._slots:  # also during the pauses: a server that is short of breath gets fewer requests
            failures = 0
            while not stop.is_set():
                asked_s, trouble, cause = None, "", None
                try:
                    answer = self._client.post("/embeddings", json=body)
                except self._passing as error:
                    trouble, cause = _named(error), error
                except self._httpx.HTTPError as error:
                    raise EmbedderInvalid(f"{self.name} could not be asked: {type(error).__name__}") from error
                else:
                    if answer.is_success:
                        return self._vectors(answer, len(texts))
                    said = self._clean(message_in(answer.text))
                    if not may_pass(answer.status_code):
                        self._refuse(answer.status_code, said)
                    trouble = f"it answered {answer.status_code}{said}"
                    asked_s = retry_after_s(answer.headers.get("retry-after"), datetime.now(UTC))
                failures += 1
                if failures >= self.backoff.attempts:
                    raise EmbedderUnavailable(
                        f"{self.name} was asked {failures} {'time' if failures == 1 else 'times'}: {trouble}"
                    ) from cause
                self._pause(self.backoff.pause_s(failures, asked_s, self._dice), stop)
        raise _Abandoned("another request of the same call failed")

    def _pause(self, seconds: float, stop: threading.Event) -> None:
        if self._sleep is not None:
            self._sleep(seconds)
        else:
            stop.wait(seconds)

    def _vectors(self, answer: httpx.Response, count: int) -> Vectors:
        vectors, model = _vectors_in(answer.content, count, self.name)
        with self._learning:
            dimension = self._dimension = self._dimension or int(vectors.shape[1])
            # All that an answer says about what made it. Two models in one index would not be found by any other check.
            first = self._answering = self._answering or model
        if vectors.shape[1] != dimension:
            raise EmbedderInvalid(
                f"{self.name} returned vectors of {vectors.shape[1]} dimensions, not of {dimension}",
                hint="set its dimension to what the model returns",
            )
        if model and model != first:
            raise EmbedderInvalid(
                f"{self.name} was answered by {first!r} and now by {model!r}",
                hint="ask for one model by its full name, then start again: vectors of two models do not compare",
            )
        return vectors

    def _refuse(self, status: int, said: str) -> NoReturn:
        hint = "look at the URL, the model and the limits of the endpoint"
        if status in (401, 403):
            hint = "set OPENAI_API_KEY (to search, OPENAI_BASE_URL too), or give an api_key that may use this model"
        elif status == 413:
            hint = "make batch or max_tokens_per_request smaller"
        raise EmbedderInvalid(f"{self.name} answered {status}{said}", hint=hint)

    def _clean(self, said: str) -> str:
        return said.replace(self._key, "***") if self._key else said

    def _fresh(self, process: int) -> None:
        """A client of this process's own: after a fork, parent and child would read each other's answers."""
        self._httpx = import_package("httpx", install=INSTALL)
        self._passing = (
            self._httpx.TimeoutException,
            self._httpx.NetworkError,
            self._httpx.RemoteProtocolError,
            self._httpx.ProxyError,
        )
        self._client: httpx.Client = self._httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=self.timeout_s,
            limits=self._httpx.Limits(max_connections=self.concurrency),
        )
        self._slots = threading.BoundedSemaphore(self.concurrency)
        self._process = process


class _Abandoned(RagfenceError):
    """Inside this module only: what a request says that was stopped because of another."""


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an address that is none
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValidationError(f"the URL of an endpoint is what comes before /embeddings, such as {OPENAI}")
    if parts.username is not None:
        raise ValidationError(
            "the URL of an endpoint is stored with each build, so it holds no password",
            hint="give an api_key, or set OPENAI_API_KEY",
        )
    return url.rstrip("/").removesuffix("/embeddings")


def _checked_key(key: str) -> str:
    key = key.strip()  # a key read from a file ends with a newline
    if not key.isascii() or not key.isprintable():
        raise ValidationError("the API key has characters that no header can hold", hint="look at OPENAI_API_KEY")
    return key


def _vectors_in(body: bytes, count: int, name: str) -> tuple[Vectors, str]:
    """As many vectors as texts, and the model that the answer names ("" where it names none)."""
    import numpy as np

    try:
        answer = json.loads(body)
        items = answer["data"]
        placed = {item.get("index", at): item["embedding"] for at, item in enumerate(items)}
        model = answer.get("model") or ""
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise EmbedderInvalid(
            f"{name} did not answer with embeddings: {type(broken).__name__}: {broken}",
            hint="is this the URL of an OpenAI-compatible endpoint?",
        ) from broken
    if len(items) != count:
        raise EmbedderInvalid(f"{name} returned {len(items)} vectors for {count} texts")
    if placed.keys() != set(range(count)):
        raise EmbedderInvalid(f"{name} numbered its vectors {sorted(map(str, placed))[:5]}, not 0 to {count - 1}")
    try:
        vectors: Vectors = np.array([placed[at] for at in range(count)], dtype=np.float32)
    except (TypeError, ValueError) as ragged:
        raise EmbedderInvalid(f"{name} did not return vectors of equal length: {ragged}") from ragged
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise EmbedderInvalid(f"{name} returned no vectors: an array {vectors.shape}", hint="does it know floats?")
    return vectors, str(model)
