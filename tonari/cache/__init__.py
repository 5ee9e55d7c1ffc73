"""`tonari cache`: stage, list, verify, export, prune."""
