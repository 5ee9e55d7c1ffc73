"""Pages, tables, pictures and figures of results, for all commands that report."""
