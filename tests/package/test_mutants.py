"""`make mutants` takes long; that each of them can still be made is seen at once."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_changes_stands_just_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
