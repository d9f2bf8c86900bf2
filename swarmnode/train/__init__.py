"""Training of a stage: microbatches along pipelines, rounds of gossip, and the node that joins both."""
