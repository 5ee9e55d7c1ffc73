"""A data loader for the DLIO benchmark, which names it in its workload file; see docs/dlio.md."""
