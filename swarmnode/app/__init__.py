"""All that a person starts: verbs, the daemon, its machine, the page, plans, a local swarm."""
