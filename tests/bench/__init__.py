"""`make bench`: ragfence beside the floor it stands on, interleaved in one run."""
