"""A whole swarm on one machine: start, watch, end and summarise its processes (`swarmnode up`)."""
