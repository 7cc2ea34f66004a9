"""The definitions of the code location, one module per kind. Copy them and change what you need."""
