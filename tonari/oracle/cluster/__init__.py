"""The machine that a job would run on: what it has, and what messages across its links take."""
