"""The assets documents, vector_index and live_alias, and snippets_by_folder, which uses the snippet_ids."""

from collections import Counter

import dagster as dg

from pipelines.settings import ALIAS, MIN_RECALL, Where
from ragfence.dagster import ON_NEW_VERSION, IngestTable, build_alias_asset, build_index_asset, build_ingest_asset
from ragfence.indexes.gates import Gates

where = Where.from_env()

# A callable is called in the run, which writes the demo's documents. Put your own folder or URL here as a string.
documents = build_ingest_asset(where.source, prune="scoped", group_name="rag")


@dg.asset(group_name="rag", automation_condition=ON_NEW_VERSION)
def snippets_by_folder(documents: IngestTable) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """How many snippets each folder has: an example of an asset that reads the snippet_ids page by page."""
    counts: Counter[str] = Counter()
    for page in documents.pages():
        for doc_id, snippet_ids in zip(page["doc_id"].to_pylist(), page["snippet_ids"].to_pylist(), strict=True):
            counts[doc_id.rpartition("/")[0] or "."] += len(snippet_ids)
    return dg.MaterializeResult(metadata={"snippets": dict(counts), "documents": len(documents)})


# Uses the embedder, backend and metric of `IndexSpec()`. Another spec gives another INDEX_HASH, and is built.
vector_index = build_index_asset(deps=[documents], group_name="rag", automation_condition=ON_NEW_VERSION)

# The golden queries are a check and a gate. The check stops this asset in a run that builds; the gate also stops it
# when the automation runs it alone.
live_alias = build_alias_asset(
    ALIAS, index=vector_index, group_name="rag", gates=Gates(golden=where.golden, min_recall=MIN_RECALL)
)
