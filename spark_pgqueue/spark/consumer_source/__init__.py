"""The source that claims the messages of a consumer."""
