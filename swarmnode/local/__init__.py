"""A whole swarm on one machine: processes started, watched, ended, summed up (`swarmnode up`)."""
