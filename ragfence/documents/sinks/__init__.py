"""Sinks: a live vector store that follows the documents."""
