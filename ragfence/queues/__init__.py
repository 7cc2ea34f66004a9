"""Queues that deliver at least once, and consumers whose effects happen once."""
