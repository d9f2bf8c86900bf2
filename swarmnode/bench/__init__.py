"""Measurements that can be repeated: each speed claim carries the command that made it (charter, point 16)."""
