"""The site builds without a warning, and its pages load nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']?(https?:)?//""")


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("mkdocstrings") and find_spec("material")),
    reason="the extra `docs` is not installed; `make docs` installs it",
)
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"]
    assert len(pages) == len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        assert not LOADED.search(page.read_text()), page
