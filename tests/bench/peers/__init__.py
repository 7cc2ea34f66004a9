"""Other libraries, each measured by a worker in an environment of its own; see `process.py`."""
