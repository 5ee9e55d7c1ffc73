"""`tonari demo`: the same model trained three ways."""
