"""Unit tests of geo_diloco.training."""
