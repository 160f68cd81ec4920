"""The words in which an op declares its proof and its rivals."""
