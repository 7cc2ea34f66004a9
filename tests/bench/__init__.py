"""`make bench`: ragfence beside what one would use instead. Part 1 is operations, part 2 (documents_*) documents."""
