"""The documents guard: every document is cut and stored once, and answered with its first snippet_ids."""
