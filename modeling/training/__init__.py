"""Training: from images to checkpoints. The scripts of `examples/` put these pieces together."""
