"""Laws instead of hand-written tests: everything here derives from the declarations in OPS."""
