"""`tonari stats`: mean, deviation and range of what a dataset holds."""
