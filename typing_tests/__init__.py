"""What type checkers and editors know of the public names: checked by `make lint`, never run."""
