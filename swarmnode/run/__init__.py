"""A run and its members: its manifest, its owner, invites, bans, amendments."""
