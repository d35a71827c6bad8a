"""From parquet shards to blocks in memory."""
