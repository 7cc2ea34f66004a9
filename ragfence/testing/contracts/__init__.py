"""The contracts of stores, backends and sinks, as tests. A store of your own proves itself with them."""
