"""What the events promise, shown on real servers with real processes. See docs/acceptance.md."""
