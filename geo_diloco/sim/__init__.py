"""The production core under a seeded clock: runs that can be had again, event for event, from their seed.

Here is what every simulator shares; only `sim.train` knows tensors. See README.md.
"""
