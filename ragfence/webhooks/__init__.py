"""Webhooks: verified, then fenced, then handled. Nothing in a delivery is used before its signature was checked."""
