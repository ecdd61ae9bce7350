"""The Spark source and sink: options → datasource → source, sink → what executors copy.

Spark starts processes for every micro-batch that import this package: Arrow and ADBC are imported
where they are used.
"""
