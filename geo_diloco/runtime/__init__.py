"""The asyncio shell around the protocol core: sockets, disk, keys and the directory. The only part that waits."""
