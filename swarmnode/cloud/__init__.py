"""The clouds' metadata services: where a machine learns that it will be taken away. aiohttp lives here."""
