"""What the Python that Spark starts needs: versions of PySpark, errors, processes, Java."""
