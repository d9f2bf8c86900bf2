"""Estimates by formula: what a fleet can train, how fast, and with which settings."""
