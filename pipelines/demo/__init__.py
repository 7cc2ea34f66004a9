"""`make demo`: ingest, build, swap and search on real documents, through Dagster. Embedded, without a server."""
