"""Measurements on whole swarms: real processes on this machine, or simulated ones."""
