"""The sink: executors stage rows, and the driver publishes them."""
