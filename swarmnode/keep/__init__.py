"""States that outlive their machine: snapshots and their transfer, checkpoints, archives, recovery."""
