"""`tonari simulate`: an exchange at any scale, without data."""
