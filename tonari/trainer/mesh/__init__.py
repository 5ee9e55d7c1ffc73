"""Who computes what: places in the mesh, parallel layers, pipelines."""
