"""ragfence.dagster: in one process, and in real ones that are doubled, killed and cancelled.

Not called "dagster", so that nothing shadows the package.
"""
