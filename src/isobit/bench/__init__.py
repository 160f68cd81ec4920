"""Times every op beside its rivals and its floor: `runner` runs, `timing` measures, `tables` renders."""
