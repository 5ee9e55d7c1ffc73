"""What a filesystem costs training: where it lies, patterns timed, and proofs of cold and warm."""
