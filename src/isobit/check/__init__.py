"""Laws, not hand-written tests: everything here is derived from the declarations in OPS."""
