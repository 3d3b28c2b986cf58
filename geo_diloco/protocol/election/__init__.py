"""Who may append to the chain: terms, votes, leases, durability, rosters. The way in is `machine.Election`."""
