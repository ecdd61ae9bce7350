"""All interleavings of small cases, on a real Postgres; see `scheduler` and `search`."""
