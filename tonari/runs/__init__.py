"""`tonari runs`: the runs below a directory, and one of them as a page."""
