"""Code to run and copy: a Dagster code location, a demo on real documents, and a race for tickets."""
