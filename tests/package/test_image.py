"""Dockerfile and compose.yaml, as far as they can be checked without Docker: the image itself is not built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import S3Server, free_ports, wait_until
from tests.servers.redis_single import valkey_binary

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
    if line.strip() and not line.startswith("#")
]
EXTRAS = re.findall(r"--extra (\S+)", DOCKERFILE)


def instruction(name: str) -> str:
    (found,) = (value for word, value in INSTRUCTIONS if word == name)
    return found


def exec_form(text: str) -> list[str]:
    """`["a", "b"]`, as ENTRYPOINT, and CMD after the options of HEALTHCHECK, have it."""
    words: list[str] = json.loads(text[text.index("[") :])
    return words


ENTRYPOINT = exec_form(instruction("ENTRYPOINT"))


def test_every_source_that_the_image_copies_is_in_the_repository_and_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [shlex.split(value) for word, value in INSTRUCTIONS if word == "COPY"]
    sources = [source for copy in copies if not copy[0].startswith("--from") for source in copy[:-1]]
    assert len(sources) >= 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in allowed, source


def test_the_build_stage_is_copied_from_and_the_server_is_not_root() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", DOCKERFILE, re.M)
    assert [name for _, name in stages] == ["build", ""]
    assert re.findall(r"--from=(\w+)", DOCKERFILE) == ["build"]
    last = DOCKERFILE.rindex("\nFROM ")
    assert re.search(r"^USER 10001$", DOCKERFILE[last:], re.M)


def test_the_extras_of_the_image_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert EXTRAS
    for extra in EXTRAS:
        assert re.search(rf"^{extra} = \[", project, re.M), extra


def test_compose_has_stores_that_ragfence_accepts_and_waits_for_them() -> None:
    assert set(SERVICES) == {"ragfence", "valkey", "s3", "bucket"}
    command = " ".join(SERVICES["valkey"]["command"])
    assert "--maxmemory-policy noeviction" in command
    assert "--appendonly yes" in command
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
    named = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert named == set(COMPOSE["volumes"])
    environment = SERVICES["ragfence"]["environment"]
    assert environment["RAGFENCE_STORE"].startswith("redis://valkey:")
    assert environment["AWS_ENDPOINT_URL_S3"].startswith("http://s3:")
    assert (
        environment["RAGFENCE_OBJECTS"].removeprefix("s3://").partition("/")[0] in SERVICES["bucket"]["entrypoint"][-1]
    )
    content = COMPOSE["configs"]["s3"]["content"]
    assert json.loads(content)["identities"][0]["credentials"][0]["accessKey"] == "${AWS_ACCESS_KEY_ID}"


def test_the_supervisor_waits_longer_than_the_server_needs_to_stop() -> None:
    options = dict(zip(ENTRYPOINT[2::2], ENTRYPOINT[3::2], strict=True))
    needed = float(options["--drain"]) + float(options["--shutdown-grace"]) + 10
    assert float(SERVICES["ragfence"]["stop_grace_period"].removesuffix("s")) > needed


@pytest.fixture
def compose_valkey(tmp_path: Path) -> Iterator[int]:
    """The port of a Valkey that was started with the options of compose.yaml."""
    (port,) = free_ports(1)
    command = [valkey_binary(), *SERVICES["valkey"]["command"][1:]]
    with started([*command, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)], os.environ):
        yield port


def test_the_entry_point_serves_on_the_stores_of_compose_and_stops_when_it_is_told_to(
    compose_valkey: int, moto_server: S3Server, tmp_path: Path, s3_env: None
) -> None:
    given: dict[str, str] = SERVICES["ragfence"]["environment"]
    bucket = given["RAGFENCE_OBJECTS"].removeprefix("s3://").partition("/")[0]
    moto_server.client().create_bucket(Bucket=bucket)
    (port,) = free_ports(1)
    own = {
        "RAGFENCE_STORE": given["RAGFENCE_STORE"].replace("valkey:6379", f"127.0.0.1:{compose_valkey}"),
        "RAGFENCE_OBJECTS": given["RAGFENCE_OBJECTS"],
        "AWS_ENDPOINT_URL_S3": moto_server.url,
        "RAGFENCE_POLICY": str(ROOT / "pipelines/ragfence.yml"),  # the Dockerfile copies it to /etc
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    words = [str(port) if word == "8080" else word for word in ENTRYPOINT]
    words[words.index("--drain") + 1] = "0"  # only to be quicker
    health = [
        word.replace(":8080", f":{port}") if word != "python" else sys.executable
        for word in exec_form(instruction("HEALTHCHECK"))
    ]
    with started(words, os.environ | own, folder=tmp_path) as server:
        wait_until(
            lambda: subprocess.run(health, capture_output=True, check=False).returncode == 0,
            "the server is healthy",
            within_s=120,
        )
        ready = [word.replace("/healthz", "/readyz") for word in health]
        wait_until(
            lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0, "both stores answer"
        )
        server.terminate()
        assert server.wait(60) == 0
    assert subprocess.run(health, capture_output=True, check=False).returncode != 0


@contextmanager
def started(
    words: list[Any], env: dict[str, str] | os._Environ[str], folder: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    silent = subprocess.DEVNULL
    with subprocess.Popen(words, cwd=folder, env=env, stdout=silent, stderr=silent) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
