"""Judges what peers say: answers, packets, states."""
