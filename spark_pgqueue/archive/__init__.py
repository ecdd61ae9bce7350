"""The archive of a stream: Parquet files with its old messages, and the exporter that writes them.

`layout` says what a file is, `folders` where it is, `pieces` how a reader knows that it is what was
written, `files` how it is read, and `exporter` how it comes to be there.
"""
