"""The guard for indexes: built once per INDEX_HASH, and aliases that read only what is sealed."""
