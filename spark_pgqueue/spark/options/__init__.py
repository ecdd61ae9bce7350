"""The options of the Spark source and sink: a dataclass for each side, and the checks.

Spark passes options as strings under lower-cased names. Messages show them as they are documented,
in camelCase, and never show the value of `url`, which may hold a password.
"""
