"""Content-addressed bytes from node to node: data sets, base models and states, in chunks with hashes."""
