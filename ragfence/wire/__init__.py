"""What client and server share: messages, schemas, and problems. Imports the core only."""
