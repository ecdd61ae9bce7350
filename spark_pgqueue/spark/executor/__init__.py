"""What tasks do on executors to read."""
