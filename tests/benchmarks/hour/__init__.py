"""An hour of steady load, with autovacuum: what grows, and how late messages are."""
