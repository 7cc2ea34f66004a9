"""Backends: whatever holds the rows of an index and searches them, behind one small protocol."""
