"""Sources made of other things: of sources, pipelines, datasets."""
