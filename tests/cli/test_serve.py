"""`ragfence serve` as a process: what it tells, what it refuses, and a document that is sent to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from ragfence.cli.app import app
from tests.cli.test_process import ROOT


@contextmanager
def serving(folder: Path, *options: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAGFENCE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ragfence", "serve", "--port", "0", *options],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background of a shell has it ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def refused(*options: str) -> Any:
    done = CliRunner().invoke(app, ["serve", *options, "--json"])
    assert done.exit_code == 1, done.output
    return json.loads(done.stdout)["error"]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_document_is_taken_once_and_the_server_stops_when_asked_to(tmp_path: Path, workers: str) -> None:
    with serving(tmp_path, "--insecure-dev", "--json", "--workers", workers) as process:
        told = json.loads(line(process))
        assert told == {
            "url": f"http://127.0.0.1:{told['port']}",
            "host": "127.0.0.1",
            "port": told["port"],
            "pid": process.pid,
            "workers": int(workers),
        }
        with httpx.Client(base_url=told["url"], timeout=60) as client:
            assert client.get("/healthz").status_code == 200
            sent = {"headers": {"Idempotency-Key": "k"}, "json": {"doc_id": "a", "text": "Hello."}}
            first, second = (client.post("/v1/documents", **sent) for _ in range(2))
            assert (first.status_code, first.headers["idempotency-status"]) == (201, "stored"), first.text
            assert (second.content, second.headers["idempotency-status"]) == (first.content, "replayed")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert err.startswith("WARNING: --insecure-dev")
        assert len(err.splitlines()) == 1


def test_people_are_told_where_it_listens_and_what_to_try_first(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        where, curl, key = (line(process) for _ in range(3))
        assert where.startswith("listening on http://127.0.0.1:")
        assert ", 1 worker; stop with Ctrl-C" in where
        assert curl.startswith("  curl http://127.0.0.1:")
        assert "'Idempotency-Key: first-1'" in curl
        assert "ragfence apikeys create" in key
        url = where.split()[2].rstrip(",")
        assert httpx.get(f"{url}/v1/documents/a").status_code == 401
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


def test_without_keys_only_loopback_is_served() -> None:
    error = refused("--insecure-dev", "--host", "0.0.0.0")
    assert error["code"] == "VALIDATION"
    assert "0.0.0.0 can be reached from other machines" in error["message"]
    assert "--host 127.0.0.1" in error["hint"]


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    assert "--tls-key" in refused("--tls-cert", str(tmp_path / "a.pem"))["hint"]


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_in_words(tmp_path: Path) -> None:
    with serving(tmp_path, "--insecure-dev", "--json") as process:
        port = json.loads(line(process))["port"]
        error = refused("--insecure-dev", "--port", str(port))
    assert f"port {port}" in error["message"]
    assert "--port" in error["hint"]


def test_a_policy_with_a_quota_nobody_understands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ragfence.yml").write_text("http: {quotas: [many/day]}\n")
    with serving(tmp_path, "--insecure-dev", "--json") as process:
        told = json.loads(line(process))
        assert process.wait(60) == 1
    assert "http.quotas: 'many/day' is not a valid quota" in told["error"]["message"]


def test_a_quota_is_told_over_http(tmp_path: Path) -> None:
    (tmp_path / "policy.yml").write_text("http: {quotas: [2/hour]}\n")
    with serving(tmp_path, "--insecure-dev", "--json", "--policy", "policy.yml") as process:
        url = json.loads(line(process))["url"]
        answers = [httpx.get(f"{url}/v1/documents/a") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [404, 404, 429]
        assert {answer.headers["ratelimit-policy"] for answer in answers} == {'"2-per-1-hour";q=2;w=3600'}
        assert int(answers[-1].headers["retry-after"]) > 1
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_a_prefix_opens_no_admin_address_to_writers(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["apikeys", "create", "--role", "write", "--json"])
    headers = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}", "Idempotency-Key": "k"}
    with serving(tmp_path, "--json", "--root-path", "/rag") as process:
        url = json.loads(line(process))["url"]
        assert httpx.post(f"{url}/v1/admin/purge-expired", json={}, headers=headers).status_code == 403
