"""Embedders: whatever turns texts into vectors, behind one small protocol."""
