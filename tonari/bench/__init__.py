"""`tonari bench`: measure the loader, the exchange, importance, a filesystem."""
