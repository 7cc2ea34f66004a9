"""Failure drills: replicated, sharded and plain Redis lose servers under load, and what callers saw is judged."""
