"""Sync: the documents of a source, each read only if it changed."""
