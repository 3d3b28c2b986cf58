"""The core: one state machine per peer, without I/O. `peer.Peer` is the way in; README.md here tells the rules."""
