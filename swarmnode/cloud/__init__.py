"""Clients of the clouds' metadata services, which announce preemptions. Only this folder imports aiohttp."""
