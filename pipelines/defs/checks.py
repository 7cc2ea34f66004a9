"""Checks of the index: its contents match the fence, and the golden queries find what they must."""

from pipelines.defs.assets import vector_index, where
from pipelines.settings import MIN_RECALL
from ragfence.dagster import corpus_matches_index, golden_queries, no_duplicate_effects

checks = [no_duplicate_effects(vector_index), corpus_matches_index(vector_index)]
if where.golden:
    checks.append(golden_queries(where.golden, vector_index, min_recall=MIN_RECALL))
