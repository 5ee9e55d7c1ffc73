"""`tonari certify`: what a run trained, as a document that can be recomputed."""
