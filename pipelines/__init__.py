"""Things a newcomer runs and copies: a Dagster code location, the demo on real documents, a race for tickets."""
