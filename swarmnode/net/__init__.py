"""Nodes that reach and know each other: transports and directory, records, liveness, progress."""
