"""`RagIndexComponent`: from Python and from YAML, one or several; what is wrong is said where it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox
from dagster.components.testing.utils import component_defs
from pydantic import ValidationError as FieldError

from ragfence.dagster import RagIndexComponent
from ragfence.errors import ValidationError
from tests.dagster.world import World, told

pytestmark = [  # Dagster's own, when it loads YAML
    pytest.mark.filterwarnings("ignore:`parse_obj_as`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
]

LEAVE = "Thirty days of leave a year, taken in weeks or days."


@pytest.fixture
def component(world: World) -> Any:
    """Made with attributes, and with a store of its own."""
    world.write("leave", LEAVE)
    world.write("travel", "Trains before planes; receipts within a month.")

    def made(**attributes: Any) -> RagIndexComponent:
        given = {"source": str(world.source), "alias": "handbook", "store": str(world.folder / "fence"), **attributes}
        return RagIndexComponent(**given)

    return made


def jobs_of(defs: dg.Definitions) -> set[str]:
    return {job.name for job in defs.resolve_all_job_defs()} - {
        "__ASSET_JOB",
        "__anonymous_asset_job_documents_changed",
    }


def materialized(world: World, defs: dg.Definitions) -> dg.ExecuteInProcessResult:
    return defs.resolve_implicit_global_asset_job_def().execute_in_process(instance=world.instance)


def test_a_component_is_three_assets_their_checks_jobs_sensor_and_schedules(world: World, component: Any) -> None:
    defs = component_defs(component=component(group="hr"))
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    assert {key.to_user_string() for key in graph.materializable_asset_keys} == {
        "documents",
        "vector_index",
        "live_alias",
    }
    assert {key.name for key in graph.asset_check_keys} == {
        "every_document_ingested",
        "no_duplicate_effects",
        "corpus_matches_index",
    }
    assert {graph.get(key).group_name for key in graph.materializable_asset_keys} == {"hr"}
    assert jobs_of(defs) == {"ingest", "build_and_swap", "verify", "purge_expired", "gc", "drain"}
    assert defs.resolve_sensor_def("documents_changed")
    assert defs.resolve_schedule_def("verify_schedule")
    result = materialized(world, defs)
    assert told(result, "live_alias")["changed"] is True
    assert all(check.passed for check in result.get_asset_check_evaluations())
    with world.open() as fence:
        assert fence.search("handbook", "how much vacation do I have?", k=1)[0].doc_id == "leave.txt"


def test_sensor_and_schedules_can_be_left_out(component: Any) -> None:
    defs = component_defs(component=component(sensor=False, schedules=False))
    assert jobs_of(defs) == {"ingest", "build_and_swap"}
    assert not list(defs.sensors or ())
    assert not list(defs.schedules or ())


def test_two_components_with_a_prefix_live_in_one_code_location_each_with_its_fence(
    world: World, component: Any
) -> None:
    made = [
        component_defs(component=component(prefix=f"{name}_", alias=name, store=str(world.folder / name)))
        for name in ("hr", "it")
    ]
    defs = dg.Definitions.merge(*made)
    dg.Definitions.validate_loadable(defs)
    result = materialized(world, defs)
    assert told(result, "hr_live_alias")["alias"] == "hr"
    assert defs.resolve_job_def("it_verify").execute_in_process(instance=world.instance).success
    for name in ("hr", "it"):
        assert (world.folder / name / "fences.db").exists()


def test_the_jobs_do_their_part(world: World, component: Any) -> None:
    defs = component_defs(component=component())
    ingest = defs.resolve_job_def("ingest").execute_in_process(instance=world.instance)
    assert told(ingest, "documents")["listed"] == 2
    swapped = defs.resolve_job_def("build_and_swap").execute_in_process(instance=world.instance)
    assert told(swapped, "live_alias")["generation"] == 1


def test_shards_make_partitions_and_need_no_sensor(component: Any) -> None:
    defs = component_defs(component=component(shards=True))
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    partitions = graph.get(dg.AssetKey("documents")).partitions_def
    assert partitions is not None
    assert len(partitions.get_partition_keys()) == 64
    assert not list(defs.sensors or ())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metric": "manhattan"}, "cosine"),
        ({"prune": "all"}, "scoped"),
        ({"source": 7}, "string"),
        ({"shards": "perhaps"}, "bool"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_would_be_right(
    component: Any, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(FieldError, match=said):
        component(**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"alias": "Hand Book"}, "Hand Book"),
        ({"min_recall": 2.0}, "0 to 1"),
        ({"shards": True, "prune": "full"}, "shards"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_when_the_definitions_are_built(
    component: Any, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        component_defs(component=component(**wrong))


@pytest.fixture
def sandbox() -> Iterator[Any]:
    with create_defs_folder_sandbox() as made:
        yield made


def scaffolded(sandbox: Any, attributes: dict[str, Any], **files: str) -> Path:
    yaml = {"type": "ragfence.dagster.RagIndexComponent", "attributes": attributes}
    path: Path = sandbox.scaffold_component(RagIndexComponent, defs_yaml_contents=yaml)
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return path


def test_from_yaml_paths_are_relative_to_the_file(world: World, sandbox: Any) -> None:
    attributes = {
        "source": "docs/",
        "alias": "handbook",
        "golden": "golden.jsonl",
        "store": str(world.folder / "fence"),
    }
    golden = '{"query": "how much vacation?", "doc_id": "leave.txt", "k": 1}\n'
    path = scaffolded(sandbox, attributes, docs__leave_dot_txt=LEAVE, golden_dot_jsonl=golden)
    with sandbox.load_component_and_build_defs(defs_path=path) as (component, defs):
        assert isinstance(component, RagIndexComponent)
        result = materialized(world, defs)
    assert told(result, "documents")["listed"] == 1
    (check,) = [each for each in result.get_asset_check_evaluations() if each.check_name == "golden_queries"]
    assert (check.passed, check.blocking) == (True, True)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"alias": "handbook"}, "source"),
        ({"source": "docs/", "alias": "handbook", "metric": "manhattan"}, "metric"),
        ({"source": "docs/", "alias": "handbook", "colour": "red"}, "colour"),
    ],
)
def test_from_yaml_what_is_missing_unknown_or_wrong_is_named(
    sandbox: Any, attributes: dict[str, Any], said: str
) -> None:
    path = scaffolded(sandbox, attributes)
    with pytest.raises(Exception, match="RagIndexComponent") as raised, sandbox.load_component_and_build_defs(path):
        pass
    causes, error = "", raised.value.__cause__
    while error is not None:
        causes, error = f"{causes}\n{error}", error.__cause__
    assert said in causes
