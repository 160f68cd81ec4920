"""The command line: `isobit check`, `bench`, `report`, `memcheck`, `drift`, `info` and `demo`."""
