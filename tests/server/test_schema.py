"""The OpenAPI document is what the server does: requests made from it never meet a 5xx or a status it does not name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.processes import Served, served
from tests.server.webhook_calls import SECRET, policy_of, signed

_numbers = itertools.count()
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Without the drain in the background: it draws from `random` while Hypothesis makes an example, which it notices.
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SECRET_GITHUB", SECRET)
        policy: dict[str, Any] = {"audit": {"drain_every_s": 0}, "webhooks": {"github": policy_of("github")}}
        with served(tmp_path_factory.mktemp("schema"), **policy) as made:
            yield made


@schemathesis.serializer("application/x-ndjson")
def as_lines(context: Any, value: Any) -> bytes:
    return str(value).encode("utf-8", "replace")


SLOW = {("POST", "/v1/builds"): "a build of strangers' documents takes seconds each"}
SHORT_EXAMPLES, DEFAULT_EXAMPLES = 25, 100


def test_what_is_asked_as_described_is_answered_as_described(api: Served, token: str) -> None:
    operations = [each for each in _operations(api) if (each.method.upper(), each.path) not in SLOW]
    assert len(operations) >= 20
    for operation in operations:
        _ask(operation, token, SHORT_EXAMPLES)


@pytest.mark.parametrize(
    "value", [{}, [], 1, {"page": {}}, {"page": {"id": 1, "version": 1, "body": "Hello."}}, b"{", b""]
)
def test_whatever_a_webhook_is_sent_its_answer_is_described(api: Served, value: Any) -> None:
    described = api.client.get("/openapi.json").json()["paths"]["/webhooks/{name}"]["post"]["responses"]
    good, body = signed("github", value, event_id=f"schema-{next(_numbers)}")
    for headers in (good, {}):
        answer = api.client.post("/webhooks/github", content=body, headers=headers)
        assert answer.status_code < 500
        content = described[str(answer.status_code)]["content"]
        assert answer.headers["content-type"] in content


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_operation_with_the_default_number_of_examples(api: Served, token: str) -> None:
    for operation in _operations(api):
        _ask(operation, token, DEFAULT_EXAMPLES)


def _operations(api: Served) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", api.app).get_all_operations()]


def _ask(operation: Any, token: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(operation.as_strategy())
    def check(case: Any) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        if operation.method.upper() in ("POST", "PUT", "DELETE"):
            headers["Idempotency-Key"] = f"schema-{next(_numbers)}"
        answer = case.call(headers=headers)
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=CHECKS)

    check()


@pytest.fixture(scope="module")
def token(api: Served) -> str:
    return api.caller("schema").token


def test_every_operation_has_a_summary_and_every_write_an_example(api: Served) -> None:
    told = api.client.get("/openapi.json").json()
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                assert "example" in content, (method, path)
            for status, answer in operation["responses"].items():
                assert answer["description"], (method, path, status)


def test_the_description_names_no_place_of_this_machine(api: Served, tmp_path: Path) -> None:
    assert str(tmp_path.parent.parent) not in api.client.get("/openapi.json").text
