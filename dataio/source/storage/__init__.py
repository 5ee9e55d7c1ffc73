"""Bytes of files: local, remote, throttled, retried."""
