"""What a machine can do, measured: messages by kind and size, and what ranks cost each other."""
