"""`tonari train`: a run as a TOML file says."""
