"""`make demo`: the main job on real documents, through Dagster, embedded, no server."""
