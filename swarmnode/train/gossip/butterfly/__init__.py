"""Rounds in which each member averages some pieces of all packets: a butterfly all-reduce, checked (BTARD)."""
