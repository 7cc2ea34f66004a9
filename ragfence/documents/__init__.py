"""The documents guard: every document is chunked and stored once; later calls get the first snippet_ids."""
