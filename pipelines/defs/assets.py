"""documents -> vector_index -> live_alias; and documents -> snippets_by_folder, which uses the snippet_ids."""

from collections import Counter

import dagster as dg

from pipelines.settings import ALIAS, MIN_RECALL, Where
from ragfence.dagster import ON_NEW_VERSION, IngestTable, build_alias_asset, build_index_asset, build_ingest_asset
from ragfence.indexes.gates import Gates

where = Where.from_env()

# A callable is asked in the run: the demo's documents are written then. A folder or a URL of yours goes here as is.
documents = build_ingest_asset(where.source, prune="scoped", group_name="rag")


@dg.asset(group_name="rag", automation_condition=ON_NEW_VERSION)
def snippets_by_folder(documents: IngestTable) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """How many snippets each folder has. Whatever you do with snippet_ids has this form: page by page, on every run."""
    counts: Counter[str] = Counter()
    for page in documents.pages():
        for doc_id, snippet_ids in zip(page["doc_id"].to_pylist(), page["snippet_ids"].to_pylist(), strict=True):
            counts[doc_id.rpartition("/")[0] or "."] += len(snippet_ids)
    return dg.MaterializeResult(metadata={"snippets": dict(counts), "documents": len(documents)})


# Embedder, backend and metric are those of `IndexSpec()`; give it another one, and another INDEX_HASH is built.
vector_index = build_index_asset(deps=[documents], group_name="rag", automation_condition=ON_NEW_VERSION)

# The golden queries are a check and a gate: the check stops this asset in a run that builds, the gate also when the
# automation runs it alone.
live_alias = build_alias_asset(
    ALIAS, index=vector_index, group_name="rag", gates=Gates(golden=where.golden, min_recall=MIN_RECALL)
)
