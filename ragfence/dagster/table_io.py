"""How the table of an ingest asset gets to the assets downstream of it.

The rows are in the object store. What Dagster stores is the reference to them, in the metadata of the materialization,
so that any machine which sees Dagster's event log and the object store can load it, for one partition or for many.
"""

from typing import Any

import dagster as dg

from ragfence.dagster.versions import recorded_metadata
from ragfence.documents.sync.ingest_table import IngestTable

REFERENCE = "table"
"""the entry of the metadata that holds the reference"""


class TableIOManager(dg.IOManager):
    """Loads the table as what the parameter of the downstream asset is annotated with.

    IngestTable (or nothing)    a reference that is read page by page
    pyarrow.Table               the whole table in memory
    pyarrow.RecordBatchReader   a stream of batches
    pandas.DataFrame            the whole table in memory; needs pandas

    Several partitions are one table.
    """

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Nothing is left to store: the asset itself has put the reference into the metadata."""

    def load_input(self, context: dg.InputContext) -> Any:
        partitions = list(context.asset_partition_keys) if context.has_asset_partitions else None
        found = recorded_metadata(self._instance, context.asset_key, REFERENCE, partitions)
        if not found:
            of = f" (partitions {', '.join(partitions[:3])}, ...)" if partitions else ""
            raise dg.Failure(
                description=f"{context.asset_key.to_user_string()}{of} has no table yet. Materialize it first.",
                allow_retries=False,
            )
        return _converted(IngestTable.join(map(IngestTable.from_json, found)), context.dagster_type.typing_type)


@dg.io_manager(description="Loads the table of an ingest asset by the reference in its materialization.")
def table_io_manager(context: dg.InitResourceContext) -> TableIOManager:
    assert context.instance is not None
    return TableIOManager(context.instance)


def _converted(table: IngestTable, wanted: Any) -> Any:
    import pyarrow as pa

    if wanted is pa.Table:
        return table.to_arrow()
    if wanted is pa.RecordBatchReader:
        return table.to_reader()
    name = f"{getattr(wanted, '__module__', '')}.{getattr(wanted, '__qualname__', '')}"
    if name.startswith("pandas.") and name.endswith(".DataFrame"):
        return table.to_pandas()
    return table
