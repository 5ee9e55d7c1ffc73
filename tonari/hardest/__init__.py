"""`tonari hardest`: rows that never become easy."""
