"""claim -> effect -> commit -> seal: leases, heartbeat, waiting, takeover, hydration."""
