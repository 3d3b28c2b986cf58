"""Training under virtual time: real tensors, the production core and numerics, everything else simulated."""
