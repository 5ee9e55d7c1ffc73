"""Doors for frameworks that own the loop, a file each; see docs/frameworks.md."""
