"""`make wheel-check`: builds the wheel, installs it into an empty environment, and uses it away from the tree.

Nothing but the wheel and its base dependencies is there: what works only from a clone, or only with an extra that is
installed by chance, fails here. `--no-install` stops after the check of the wheel's contents, which needs no network.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SMOKE = """
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import ragfence

assert Path(ragfence.__file__).is_relative_to(Path(sys.prefix)), ragfence.__file__
assert ragfence.__version__ == version("ragfence")
assert not any(name in sys.modules for name in ("dagster", "redis", "boto3", "lancedb", "pyarrow"))
assert any(str(file).endswith("ragfence/py.typed") for file in distribution("ragfence").files)

with ragfence.open("state") as fence:
    first = fence.documents.ingest(ragfence.Document("a", "A lease that expired can be taken over."))
    again = fence.documents.ingest(ragfence.Document("a", "A lease that expired can be taken over."))
    assert (first.decision, again.decision) == ("new", "duplicate")
    assert first.snippet_ids == again.snippet_ids

    @fence.once(kind="ticket", key=lambda request: request["id"])
    def create_ticket(request):
        return f"ticket-{request['id']}"

    assert create_ticket({"id": 7}).decision == "new"
    assert create_ticket({"id": 7}).decision == "duplicate"
"""


def build(folder: Path) -> Path:
    """Returns the wheel, built with the build back end of this environment and without a network."""
    program = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return folder / done.stdout.split()[-1]


def check_contents(wheel: Path) -> None:
    """The package, its Lua scripts and its type marker; no tests, no demo, nothing else at the top."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ragfence"}, tops
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "ragfence"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    missing = {name for name in tracked if name and (ROOT / name).exists()} - set(names)
    assert not missing, f"not in the wheel: {sorted(missing)}"


def check_installed(wheel: Path, folder: Path) -> None:
    environment = folder / "environment"
    python = environment / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, wheel], check=True)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAGFENCE_"))}
    subprocess.run([python, "-W", "error", "-c", SMOKE], cwd=elsewhere, env=env, check=True)
    ragfence = environment / "bin" / "ragfence"
    subprocess.run([ragfence, "--version"], cwd=elsewhere, env=env, check=True)
    subprocess.run([ragfence, "status", "--store", "state"], cwd=elsewhere, env=env, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("--no-install", action="store_true", help="check only what the wheel contains")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ragfence-wheel-") as temporary:
        folder = Path(temporary)
        wheel = build(folder)
        check_contents(wheel)
        if not options.no_install:
            check_installed(wheel, folder)
        print(f"{wheel.name} is complete" + ("" if options.no_install else ", installs alone, and works"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
