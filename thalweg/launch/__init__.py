"""From wishes to a running engine: the hub, the resolver and its report, the server's start."""
