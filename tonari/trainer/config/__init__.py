"""What a TOML file says of a run."""
