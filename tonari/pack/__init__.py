"""`tonari pack`: Parquet or image folders into tar shards."""
