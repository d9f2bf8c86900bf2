"""Measurements of training methods: many replicas of a small model in one process."""
