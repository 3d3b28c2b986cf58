"""The demo command, piece by piece, without a run."""
