"""Penstock on Spark: the only package that imports pyspark. The tasks are the same as everywhere."""
