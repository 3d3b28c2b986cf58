"""The command line: one file per command, each importing what it does only when it runs, so that `--help` is quick."""
