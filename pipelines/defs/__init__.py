"""What the code location consists of, one module for each kind of thing. Copy it, and change what is yours."""
