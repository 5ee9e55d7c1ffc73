"""What a GPU is asked: a file a row, in the order of worth; see ``__main__.py``."""
