"""The archive of a stream: Parquet files with its old messages, and the exporter that writes them.

`layout` says what a file is, `folders` where it is, `exporter` how it comes to be there.
"""
