"""Passes the table of an ingest asset to downstream assets.

The rows are in the object store. Dagster stores a reference to them in the metadata of the materialization. Any machine
that can read Dagster's event log and the object store can load the table, for one partition or for several.
"""

from typing import Any

import dagster as dg

from ragfence.dagster._event_log import recorded_metadata
from ragfence.documents.sync.ingest_table import IngestTable

REFERENCE = "table"
"""The metadata key of the reference."""


class TableIOManager(dg.IOManager):
    """Loads the table as the type that the parameter of the downstream asset is annotated with.

    IngestTable, or none        a reference that is read page by page
    pyarrow.Table               the whole table in memory
    pyarrow.RecordBatchReader   a stream of batches
    pandas.DataFrame            the whole table in memory; needs pandas

    Several partitions are joined to one table.
    """

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Stores nothing: the asset has put the reference into the metadata."""

    def load_input(self, context: dg.InputContext) -> Any:
        partitions = list(context.asset_partition_keys) if context.has_asset_partitions else None
        found = recorded_metadata(self._instance, context.asset_key, REFERENCE, partitions)
        if not found:
            of = f" (partitions {', '.join(partitions[:3])}, ...)" if partitions else ""
            raise dg.Failure(
                description=f"{context.asset_key.to_user_string()}{of} has no table yet. Materialize it first.",
                allow_retries=False,
            )
        return _convert(IngestTable.join(map(IngestTable.from_json, found)), context.dagster_type.typing_type)


@dg.io_manager(description="Loads the table of an ingest asset by the reference in its materialization.")
def table_io_manager(context: dg.InitResourceContext) -> TableIOManager:
    assert context.instance is not None
    return TableIOManager(context.instance)


def _convert(table: IngestTable, wanted: Any) -> Any:
    import pyarrow as pa

    if wanted is pa.Table:
        return table.to_arrow()
    if wanted is pa.RecordBatchReader:
        return table.to_reader()
    name = f"{getattr(wanted, '__module__', '')}.{getattr(wanted, '__qualname__', '')}"
    if name.startswith("pandas.") and name.endswith(".DataFrame"):
        return table.to_pandas()
    return table
