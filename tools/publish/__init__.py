"""Writes the tables and charts of this project's pages from the result files under `results/`."""
