"""The byte side of the shell: keys, wire, disk, blobs over HTTP, control connections."""
