"""Which ranks share what: axes with their collectives, and the layout that says which axis each sublayer uses."""
