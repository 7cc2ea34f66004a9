"""Embeddings from any OpenAI-compatible HTTP endpoint: OpenAI, vLLM, Ollama, text-embeddings-inference, LiteLLM ...

Texts are sent in requests of limited number and size, several at the same time. Vectors are returned in the order of
the texts, whatever the order of the response. Temporary errors (see `core.backoff`) are retried; all others fail at
once with the server's message. The API key does not appear in names, messages or reprs.
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

    Args:
        url: What comes before /embeddings.
        model: The name of the model.
        dimension: If not given, found out with one request.
        revision: If not given, the model's name. It cannot be seen from outside that a server has new weights under the
            same name: set the revision, and change it with the weights.
        api_key: If not given, OPENAI_API_KEY.
        batch: Maximum number of texts per request.
        max_tokens_per_request: Estimated as bytes / 4. A longer text is sent alone.
        concurrency: Requests at the same time, in all threads together.
        timeout_s: For each attempt: to connect, and between two parts of the response.
        attempts: Before a request fails with EmbedderUnavailable.
        first_pause_s: The longest pause after the first failure; it doubles with each failure.
        longest_pause_s: The limit of the pauses.
        normalised: True if all vectors have length 1.
        sleep: Called instead of waiting.
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
        self.url = _check_url(url)
        if not model:
            raise ValidationError("an endpoint needs the name of a model", hint="openai+<url>#<model>")
        if batch < 1 or max_tokens_per_request < 1 or concurrency < 1 or timeout_s <= 0:
            raise ValidationError("batch, max_tokens_per_request, concurrency and timeout_s must be above 0")
        self.model = model
        self.name = f"openai:{model}" if self.url == OPENAI else f"openai+{self.url}#{model}"
        self.revision = revision or model
        self.normalised = normalised
        self.batch = batch
        self.max_tokens_per_request = max_tokens_per_request
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.backoff = Backoff(attempts, first_pause_s, longest_pause_s)
        self._key = _check_key(api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", ""))
        self._sleep = sleep
        self._dice = random.Random()
        self._dimension = dimension
        self._answering = ""
        self._probing = threading.Lock()
        self._learning = threading.Lock()
        self._open_client(os.getpid())

    @property
    def dimension(self) -> int:
        with self._probing:
            if self._dimension is None:
                self._request_vectors([PROBE], threading.Event())  # every response sets it
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
            return self._request_vectors(requests[0], stop)
        with ThreadPoolExecutor(min(self.concurrency, len(requests)), "ragfence-embed") as pool:
            futures = [pool.submit(self._request_vectors, request, stop) for request in requests]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = [error for future in done if (error := future.exception())]
            finally:
                # After a failure or an interrupt, do not pay for responses that will not be read.
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise failed[0]
        return np.concatenate([future.result() for future in futures])

    def close(self) -> None:
        self._client.close()

    def __repr__(self) -> str:
        return f"EndpointEmbedder({self.url!r}, {self.model!r}, revision={self.revision!r})"

    def _requests(self, texts: Sequence[str]) -> Iterator[list[str]]:
        request: list[str] = []
        tokens = 0
        for text in texts:
            # OpenAI refuses a whole request if one text is empty; a space is the nearest text that it takes.
            text = text or " "
            size = estimated_tokens(text)
            if request and (len(request) >= self.batch or tokens + size > self.max_tokens_per_request):
                yield request
                request, tokens = [], 0
            request.append(text)
            tokens += size
        if request:
            yield request

    def _request_vectors(self, texts: list[str], stop: threading.Event) -> Vectors:
        """Sends one request, again if need be, and returns its vectors."""
        if self._process != os.getpid():
            self._open_client(os.getpid())
        body = {"model": self.model, "input": texts, "encoding_format": "float"}
        with self._slots:  # held during the pauses, too: an overloaded server gets fewer requests
            failures = 0
            while not stop.is_set():
                server_pause_s, failure, cause = None, "", None
                try:
                    answer = self._client.post("/embeddings", json=body)
                except self._retryable as error:
                    failure, cause = _describe(error), error
                except self._httpx.HTTPError as error:
                    raise EmbedderInvalid(f"the request to {self.name} failed: {type(error).__name__}") from error
                else:
                    if answer.is_success:
                        return self._vectors(answer, len(texts))
                    message = self._clean(message_in(answer.text))
                    if not may_pass(answer.status_code):
                        self._refuse(answer.status_code, message)
                    failure = f"it answered {answer.status_code}{message}"
                    server_pause_s = retry_after_s(answer.headers.get("retry-after"), datetime.now(UTC))
                failures += 1
                if failures >= self.backoff.attempts:
                    raise EmbedderUnavailable(
                        f"{self.name} failed after {failures} {'attempt' if failures == 1 else 'attempts'}: {failure}"
                    ) from cause
                self._pause(self.backoff.pause_s(failures, server_pause_s, self._dice), stop)
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
            # The only hint at what made the vectors. No other check would find two models in one index.
            first = self._answering = self._answering or model
        if vectors.shape[1] != dimension:
            raise EmbedderInvalid(
                f"{self.name} returned vectors with {vectors.shape[1]} dimensions, not {dimension}",
                hint="set its dimension to what the model returns",
            )
        if model and model != first:
            raise EmbedderInvalid(
                f"the responses of {self.name} are from {first!r} and now from {model!r}",
                hint="use the full name of one model, then start again: vectors of two models cannot be compared",
            )
        return vectors

    def _refuse(self, status: int, message: str) -> NoReturn:
        hint = "check the URL, the model and the limits of the endpoint"
        if status in (401, 403):
            hint = "set OPENAI_API_KEY (for searches OPENAI_BASE_URL, too), or pass an api_key that may use this model"
        elif status == 413:
            hint = "make batch or max_tokens_per_request smaller"
        raise EmbedderInvalid(f"{self.name} answered {status}{message}", hint=hint)

    def _clean(self, message: str) -> str:
        return message.replace(self._key, "***") if self._key else message

    def _open_client(self, process: int) -> None:
        """Makes a new client for this process: after a fork, parent and child would read each other's responses."""
        self._httpx = import_package("httpx", install=INSTALL)
        self._retryable = (
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
    """Raised by a request that was stopped because another one failed; never leaves this module."""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or address
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValidationError(f"the URL of an endpoint must be what comes before /embeddings, such as {OPENAI}")
    if parts.username is not None:
        raise ValidationError(
            "the URL of an endpoint is stored with each build, so it must not contain a password",
            hint="pass an api_key, or set OPENAI_API_KEY",
        )
    return url.rstrip("/").removesuffix("/embeddings")


def _check_key(key: str) -> str:
    key = key.strip()  # a key read from a file ends with a newline
    if not key.isascii() or not key.isprintable():
        raise ValidationError("the API key has characters that a header cannot hold", hint="check OPENAI_API_KEY")
    return key


def _vectors_in(body: bytes, count: int, name: str) -> tuple[Vectors, str]:
    """Returns one vector for each text, in order, and the model that the response names, or ""."""
    import numpy as np

    try:
        answer = json.loads(body)
        items = answer["data"]
        by_position = {item.get("index", at): item["embedding"] for at, item in enumerate(items)}
        model = answer.get("model") or ""
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise EmbedderInvalid(
            f"the response of {name} has no embeddings: {type(broken).__name__}: {broken}",
            hint="is this the URL of an OpenAI-compatible endpoint?",
        ) from broken
    if len(items) != count:
        raise EmbedderInvalid(f"{name} returned {len(items)} vectors for {count} texts")
    if by_position.keys() != set(range(count)):
        raise EmbedderInvalid(f"{name} numbered its vectors {sorted(map(str, by_position))[:5]}, not 0 to {count - 1}")
    try:
        vectors: Vectors = np.array([by_position[at] for at in range(count)], dtype=np.float32)
    except (TypeError, ValueError) as ragged:
        raise EmbedderInvalid(f"{name} did not return vectors of equal length: {ragged}") from ragged
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise EmbedderInvalid(
            f"{name} returned an array {vectors.shape} instead of vectors",
            hint='check that the endpoint supports "encoding_format": "float"',
        )
    return vectors, str(model)
