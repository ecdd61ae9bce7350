"""The version of this package, where there is no metadata: in a zip, and in Spark's processes."""

VERSION = "0.2.0"
