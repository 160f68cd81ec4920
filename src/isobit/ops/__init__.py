"""One folder an op."""
