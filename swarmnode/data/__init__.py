"""Turns text into numbered samples. Sample i of a run is the same on every node, so feeders only agree on numbers."""
