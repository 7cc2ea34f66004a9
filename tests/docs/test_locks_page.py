"""Every python block of the page about locks runs as it stands there, in one folder, in its order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "locks.md"


def test_the_examples_about_locks_run_in_their_order(tmp_path: Path) -> None:
    said = []
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        done = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert re.fullmatch(r"locked by number \d+\.\d+\npart 0\npart 1\npart 2\nheld: True True\n", said[0])
    assert said[1:] == ["2 done, one after the other\n", "by the second holder\n", "use ttl_s=54 or less\n"]


def test_the_commands_of_the_page_show_the_lock(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    program = (
        "import subprocess, ragfence\n"
        "with ragfence.open() as fence, fence.lock('reindex:docs'):\n"
        f"    for line in {commands!r}.splitlines():\n"
        "        done = subprocess.run(line, shell=True, capture_output=True, text=True)\n"
        "        assert done.returncode == 0, done.stderr\n"
        "        print(done.stdout)\n"
    )
    path = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("locked") >= 2
    assert "locked by" in done.stdout
