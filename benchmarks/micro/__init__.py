"""Measurements of one part alone."""
