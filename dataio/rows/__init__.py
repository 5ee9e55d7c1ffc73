"""What a row is: its fields, how they are stored, and how rows travel."""
