"""Simulation: the real node code in virtual time, on simulated ports; one seed determines the whole life."""
