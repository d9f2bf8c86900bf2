"""Members of a run: invites, the access list, admission, amendments."""
