"""`make compare`: beside pgmq and a row per message, in the same run. Not a part of the tests."""
