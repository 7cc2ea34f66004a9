"""The two stores: fences (hot, atomic) and objects (durable); one file per backend."""
