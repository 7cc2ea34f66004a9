"""The pages of docs/: all of them are in the navigation, their links lead somewhere, and their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests.site import policy_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.S | re.M)
MODULE = re.compile(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)`")
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.M)

# The examples of the other pages have tests of their own, or need a server.
RUN = ("index.md", "getting-started.md", "sources.md", "chunkers.md", "once.md")
EXAMPLES = [
    (page, number, example)
    for page in RUN
    for number, example in enumerate(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M))
]


def entries(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else entries(value)


def prose(page):
    return CODE_BLOCK.sub("", (DOCS / page).read_text())


def anchors(page):
    """As Python-Markdown makes them: the site is what `make docs` checks at length."""
    text = prose(page)
    slugs = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in HEADING.findall(text):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "]", heading)).strip().lower()
        slug = re.sub(r"[-\s]+", "-", words)
        slugs.add(slug if slug not in slugs else f"{slug}_{sum(each.startswith(slug) for each in slugs)}")
    return slugs


def test_every_page_is_in_the_navigation_once():
    assert sorted(entries(SITE["nav"])) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for link in LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if "://" in link or target.startswith("mailto:"):
            continue
        file = (DOCS / page).parent / target if target else DOCS / page
        assert file.exists(), f"{page} links to {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.resolve().relative_to(DOCS)), f"{page} links to {link}"


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_exists(page):
    for module in MODULE.findall(prose(page)):
        assert (ROOT / module).exists() or (ROOT / "ragfence" / module).exists(), f"{page} names {module}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("reference/")])
def test_every_name_of_the_reference_can_be_imported(page):
    for name in DIRECTIVE.findall((DOCS / page).read_text()):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


@pytest.mark.parametrize(("page", "number", "example"), EXAMPLES, ids=[f"{page}-{at}" for page, at, _ in EXAMPLES])
def test_an_example_runs_in_an_empty_folder(page, number, example, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_policy_page_is_current():
    assert policy_page.PAGE.read_text() == policy_page.page(), "run: python -m tests.site.policy_page"


def test_every_setting_of_the_policy_says_what_it_does():
    assert [name for name, meaning in policy_page.settings().items() if not meaning] == []


def test_the_example_on_the_policy_page_is_a_valid_policy():
    (example,) = re.findall(r"^```yaml\n(.*?)^```", policy_page.PAGE.read_text(), re.S | re.M)
    policy_page.Policy.from_mapping(yaml.safe_load(example))


def test_the_picture_for_dark_mode_differs_in_its_colours_alone():
    light, dark = ((DOCS / "images" / f"overview-{mode}.svg").read_text() for mode in ("light", "dark"))
    assert light != dark
    assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
