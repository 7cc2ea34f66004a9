"""What client and server share: messages, headers, schemas and problems. Imports the core only."""

from typing import Final

SERVE_HOST: Final = "127.0.0.1"
SERVE_PORT: Final = 8080
"""Where `ragfence serve` listens, and where a client looks for it, by default."""
