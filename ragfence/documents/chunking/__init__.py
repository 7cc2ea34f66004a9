"""Chunkers: where the text of a document is cut, and into which pieces."""
