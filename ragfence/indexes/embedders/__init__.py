"""Embedders turn texts into vectors, behind one small protocol."""
