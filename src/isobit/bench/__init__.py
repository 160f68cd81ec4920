"""Times every op next to its rivals and its floor: `runner` runs, `timing` measures, `report` shows."""
