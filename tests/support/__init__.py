"""What several suites share: a deterministic in-memory cluster of real cores, and the checkers that watch it."""
