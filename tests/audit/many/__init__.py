"""Many processes decide and drain, and are killed all the while; the ledger is compared with what they were told."""
