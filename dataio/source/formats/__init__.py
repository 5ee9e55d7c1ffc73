"""What files people have: how the shards of each format are counted, and read."""
