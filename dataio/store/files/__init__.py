"""The files of a cache: where entries say that rows lie, bytes are read and written."""
