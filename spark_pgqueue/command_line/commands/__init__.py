"""The commands. Each is one or two calls of the client."""
