"""`tonari probe` and `tonari plan`: what a job takes, before it runs."""
