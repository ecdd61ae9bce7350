"""The batch readers of the tables of a queue."""
