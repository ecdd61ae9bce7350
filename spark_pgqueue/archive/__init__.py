"""The archive of a stream: Parquet files with its old messages, and the exporter that writes them.

`layout` writes files, `folders` opens the file system, `pieces` has the digests, `files` reads
files, and `exporter` exports segments.
"""
