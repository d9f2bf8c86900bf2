"""The ground of all other rooms: ports, errors, identifiers, files, bounds, metrics, messages."""
