"""Results as a page and as a picture."""
