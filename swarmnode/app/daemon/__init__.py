"""The process of a node: assembles its parts, serves its control API, and runs its tasks besides training."""
