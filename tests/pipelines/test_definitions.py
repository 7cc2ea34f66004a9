"""The code location: it loads, as Dagster and dg load it; its jobs do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

import ragfence
from pipelines.corpus import MANUAL, PACKAGES, has_manual, write_corpus
from pipelines.definitions import defs
from pipelines.settings import CORPUS, GOLDEN, MIN_RECALL, Where
from ragfence.dagster._event_log import recorded_version
from ragfence.indexes.gates import load_golden

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DOCS = (ROOT / "docs" / "dagster.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", DOCS, re.S | re.M)


@pytest.fixture
def home(tmp_path) -> Path:
    """Nothing is written outside of it, nor sent anywhere."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    return folder


def run(command: list[str], home: Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAGFENCE_", "PYTEST_"))},
        "DAGSTER_HOME": str(home),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "HOME": str(home),
        "VIRTUAL_ENV": str(BIN.parent),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        **variables,
    }
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_dagster_validates_the_definitions(home):
    done = run([str(BIN / "dagster"), "definitions", "validate", "-m", "pipelines.definitions"], home)
    assert done.returncode == 0, done.stderr


def test_dg_checks_the_definitions(home):
    done = run([str(BIN / "dg"), "check", "defs"], home)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_the_assets_jobs_checks_and_automation_it_promises():
    loaded = defs.get_repository_def()
    assert {each.name for each in loaded.get_all_jobs() if not each.name.startswith("__")} == {
        "ingest",
        "build_and_swap",
        "rollback",
        "verify",
        "purge_expired",
        "gc",
        "drain",
    }
    graph = loaded.asset_graph
    assert {each.to_user_string() for each in graph.get_all_asset_keys()} == {
        "documents",
        "snippets_by_folder",
        "vector_index",
        "live_alias",
    }
    assert {each.name for each in graph.asset_check_keys} == {
        "every_document_ingested",
        "no_duplicate_effects",
        "corpus_matches_index",
        "golden_queries",
    }
    assert {each.name for each in loaded.schedule_defs} == {
        "verify_schedule",
        "purge_expired_schedule",
        "gc_schedule",
        "drain_schedule",
    }
    assert "documents_changed" in {each.name for each in loaded.sensor_defs}
    assert defs.resolve_job_def("ingest").executor_def is dg.in_process_executor


def test_other_documents_are_not_judged_by_the_golden_queries_of_the_demo(somewhere):
    corpus = somewhere / CORPUS
    assert Where.from_env({}) == Where("", str(GOLDEN) if has_manual(corpus) else "", corpus)
    assert Where.from_env({"RAGFENCE_DEMO_SOURCE": "s3://b/p"}) == Where("s3://b/p", "", corpus)
    ours = {"RAGFENCE_DEMO_SOURCE": "handbook", "RAGFENCE_DEMO_GOLDEN": "mine.jsonl"}
    assert Where.from_env(ours) == Where("handbook", "mine.jsonl", corpus)
    assert Where.from_env(ours).source() == "handbook"
    assert not corpus.exists()


def test_a_corpus_without_the_manual_is_not_judged_by_queries_about_it(somewhere):
    (somewhere / CORPUS / PACKAGES).mkdir(parents=True)
    assert Where.from_env({}).golden == ""
    (somewhere / CORPUS / MANUAL).mkdir()
    assert Where.from_env({}).golden == str(GOLDEN)


def test_every_golden_query_names_documents_of_the_corpus(tmp_path):
    queries = load_golden(GOLDEN)
    assert len(queries) >= 12
    assert MIN_RECALL >= 0.9
    assert {each.partition("/")[0] for query in queries for each in query.expected} == {MANUAL}
    if not write_corpus(tmp_path / "corpus").topics:
        pytest.skip("this Python has no manual")
    missing = [each for query in queries for each in query.expected if not (tmp_path / "corpus" / each).is_file()]
    assert missing == []


LOADED = """
import sys
from pathlib import Path

from pipelines.definitions import defs

assert defs.get_repository_def().get_all_jobs()
assert "pydoc_data.topics" not in sys.modules
assert not list(Path.cwd().iterdir())
for _ in range(2):
    ran = defs.resolve_job_def("ingest").execute_in_process()
    (documents,) = ran.asset_materializations_for_node("documents")
    print(documents.metadata["listed"].value, documents.metadata["unread"].value)
"""


def test_the_demo_s_documents_are_written_by_the_first_run_and_not_at_import(home, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    done = run([sys.executable, "-c", LOADED], home, cwd=folder)
    assert done.returncode == 0, done.stderr
    listed = str(sum(each.is_file() for each in (folder / CORPUS).rglob("*")))
    assert int(listed) > 200
    assert done.stdout.split() == [listed, "0", listed, listed]


@pytest.fixture
def somewhere(tmp_path, monkeypatch) -> Path:
    for name in list(os.environ):
        if name.startswith("RAGFENCE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_rollback_job_goes_back_and_says_why(somewhere):
    with ragfence.open() as fence:
        hashes = []
        for text in ("Thirty days.", "Thirty-one days."):
            fence.documents.ingest(ragfence.Document("leave", text))
            hashes.append(fence.indexes.build().index_hash)
            fence.aliases.swap("docs", hashes[-1])
    config = {"ops": {"roll_back": {"config": {"reason": "it was thirty"}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        ran = defs.resolve_job_def("rollback").execute_in_process(run_config=config, instance=instance)
        version = recorded_version(instance, dg.AssetKey("live_alias"))
    with ragfence.open() as fence:
        assert fence.aliases.resolve("docs").index_hash == hashes[0]
        newest = fence.aliases.history("docs")[0]
    assert version == str(newest.number)  # the asset of the alias stands where the alias does
    assert (newest.change, newest.reason, newest.actor) == ("rollback", "it was thirty", f"dagster:{ran.run_id}")


def test_without_a_reason_nothing_is_rolled_back(somewhere):
    with pytest.raises(dg.DagsterInvalidConfigError):
        defs.resolve_job_def("rollback").execute_in_process()


@pytest.mark.slow
def test_a_source_of_ones_own_is_ingested_built_and_swapped(home, tmp_path):
    """In a process of its own: the environment is read when the definitions are loaded."""
    handbook = tmp_path / "handbook"
    handbook.mkdir()
    (handbook / "leave.md").write_text("# Leave\n\nThirty days a year.\n")
    program = (
        "from pipelines.definitions import defs\n"
        "assert [defs.resolve_job_def(each).execute_in_process().success for each in ('ingest', 'build_and_swap')]\n"
    )
    store = tmp_path / "store"
    variables = {"RAGFENCE_STORE": str(store), "RAGFENCE_DEMO_SOURCE": str(handbook)}
    done = run([sys.executable, "-c", program], home, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    with ragfence.open(store) as fence:
        (hit,) = fence.search("docs", "vacation", k=1)
    assert hit.doc_id == "leave.md"
    assert not (tmp_path / ".ragfence").exists()


@pytest.mark.slow
def test_redis_and_s3_are_a_matter_of_variables_alone(home, tmp_path, valkey_server, moto_server):
    handbook = tmp_path / "handbook"
    handbook.mkdir()
    (handbook / "leave.md").write_text("# Leave\n\nThirty days a year.\n")
    variables = {
        "RAGFENCE_STORE": valkey_server.url,
        "RAGFENCE_OBJECTS": f"s3://{moto_server.bucket}/pipelines",
        "RAGFENCE_TENANT": "pipelines",
        "RAGFENCE_DEMO_SOURCE": str(handbook),
        "AWS_ENDPOINT_URL": moto_server.url,
        "AWS_ACCESS_KEY_ID": moto_server.access_key,
        "AWS_SECRET_ACCESS_KEY": moto_server.secret_key,
        "AWS_DEFAULT_REGION": moto_server.region,
    }
    done = run([sys.executable, "-c", TWICE], home, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["new", "duplicate", "leave.md"]
    assert {each.name for each in tmp_path.iterdir()} == {"home", "handbook"}


TWICE = """
import ragfence
from pipelines.definitions import defs

for _ in range(2):
    for job in ("ingest", "build_and_swap"):
        ran = defs.resolve_job_def(job).execute_in_process()
    (index,) = ran.asset_materializations_for_node("vector_index")
    print(index.metadata["decision"].value)
with ragfence.open() as fence:
    print(fence.search("docs", "vacation", k=1)[0].doc_id)
"""


def test_the_component_of_the_docs_is_a_project_that_loads_and_runs(home, tmp_path):
    """The YAML and the TOML of docs/dagster.md, as they stand there, in a project of their own."""
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```", DOCS, re.S | re.M)
    (toml,) = re.findall(r"^```toml\n(.*?)^```", DOCS, re.S | re.M)
    project = tmp_path / "project"
    place = project / "acme" / "defs" / "handbook"
    place.mkdir(parents=True)
    (project / "pyproject.toml").write_text(toml)
    (project / "acme" / "__init__.py").touch()
    (project / "acme" / "defs" / "__init__.py").touch()
    (project / "acme" / "definitions.py").write_text(
        "from pathlib import Path\n\n"
        "import dagster as dg\n\n\n"
        "@dg.definitions\n"
        "def defs():\n"
        "    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (place / "defs.yaml").write_text(yaml)
    (place / "golden.jsonl").write_text('{"query": "how much vacation?", "doc_id": "leave.md"}\n')
    handbook = project / "acme" / "handbook"
    handbook.mkdir()
    (handbook / "leave.md").write_text("# Leave\n\nThirty days of vacation a year.\n")

    done = run([str(BIN / "dg"), "check", "yaml"], home, cwd=project, PYTHONPATH=str(project))
    assert done.returncode == 0, done.stdout + done.stderr
    program = (
        "from acme.definitions import defs\n"
        "made = defs()\n"
        "assert [made.resolve_job_def(each).execute_in_process().success for each in ('ingest', 'build_and_swap')]\n"
    )
    store = tmp_path / "store"
    done = run([sys.executable, "-c", program], home, cwd=project, RAGFENCE_STORE=str(store), PYTHONPATH=str(project))
    assert done.returncode == 0, done.stderr
    with ragfence.open(store) as fence:
        assert fence.search("handbook", "vacation", k=1)[0].doc_id == "leave.md"


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_of_the_docs_runs_in_an_empty_folder(number, home, tmp_path):
    folder = tmp_path / "empty"
    (folder / "handbook").mkdir(parents=True)
    done = run([sys.executable, "-W", "error", "-c", SNIPPETS[number]], home, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_nothing_of_dagster_is_needed_to_import_the_package():
    program = "import sys, pipelines, pipelines.settings, ragfence; assert 'dagster' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
