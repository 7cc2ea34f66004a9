"""documents -> vector_index -> live_alias."""

from pipelines.settings import ALIAS, MIN_RECALL, Where
from ragfence.dagster import ON_NEW_VERSION, build_alias_asset, build_index_asset, build_ingest_asset
from ragfence.indexes.gates import Gates

where = Where.from_env()

documents = build_ingest_asset(where.source, prune="scoped", group_name="rag")

# Embedder, backend and metric are those of `IndexSpec()`; give it another one, and another INDEX_HASH is built.
vector_index = build_index_asset(deps=[documents], group_name="rag", automation_condition=ON_NEW_VERSION)

# The golden queries are a check and a gate: the check stops this asset in a run that builds, the gate also when the
# automation runs it alone.
live_alias = build_alias_asset(
    ALIAS, index=vector_index, group_name="rag", gates=Gates(golden=where.golden, min_recall=MIN_RECALL)
)
