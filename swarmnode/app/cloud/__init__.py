"""Clients of the clouds' metadata services, which announce preemptions."""
