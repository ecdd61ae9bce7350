"""How the cost of each operation grows with streams, consumers, keys, backlog and connections."""
