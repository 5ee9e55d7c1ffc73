"""`tonari pack`: Parquet or image folders into tar shards, text into shards of tokens."""
