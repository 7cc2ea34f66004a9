"""The ingestion API under kills: servers that die and are started again, clients that send again, and a judge."""
