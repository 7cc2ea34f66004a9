"""Checks of the stores for `ragfence doctor`."""
