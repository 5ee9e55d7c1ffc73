"""Which settings of the mesh are fastest on a machine: every one priced, or shown to be slower."""
