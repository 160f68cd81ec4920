"""The command line: `isobit check`, `bench`, `report`, `memcheck`, `info` and `demo`."""
