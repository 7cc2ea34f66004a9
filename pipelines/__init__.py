"""Things a newcomer runs: the demo now, a Dagster code location later."""
