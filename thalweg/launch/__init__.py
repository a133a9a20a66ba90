"""From options to a running engine: the hub, the resolver and its report, the start of the server."""
