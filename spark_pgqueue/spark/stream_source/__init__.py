"""The source that reads streams by offset, without a consumer."""
