"""`tonari ablate`: ways to train, compared by accuracy over seeds."""
