"""Pure rules: no I/O, no clock. Every store must agree with what is decided here."""
