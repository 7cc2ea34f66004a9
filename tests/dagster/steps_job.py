"""A job with one op of three steps; each execution of a step leaves a line in a file. Configured by the environment."""

import os
from pathlib import Path

import dagster as dg

from ragfence.dagster import FenceResource


def execute(name: str, value: int) -> int:
    folder = Path(os.environ["STEPS_FOLDER"])
    with (folder / "executions").open("a") as file:
        file.write(f"{name}\n")
    if name == "load" and not (folder / "target").exists():
        raise OSError("the target is away")
    return value + 1


class StepsConfig(dg.Config):
    fresh: bool = False


@dg.op
def nightly(context: dg.OpExecutionContext, config: StepsConfig, fence: FenceResource) -> int:
    with fence.run(context, fresh=config.fresh) as step:
        extracted = step("extract", execute, "extract", 1)
        cleaned = step("clean", execute, "clean", extracted)
        return step("load", execute, "load", cleaned)


@dg.job(resource_defs={"fence": FenceResource(store=dg.EnvVar("STEPS_STORE"))}, executor_def=dg.in_process_executor)
def steps_job() -> None:
    nightly()
