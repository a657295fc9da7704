"""Training under each configuration: exact and sampled updates, fixed points, curl, stability."""
