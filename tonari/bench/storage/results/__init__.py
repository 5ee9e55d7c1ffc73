"""What was found: kept as a document, compared, summed up."""
