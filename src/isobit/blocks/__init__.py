"""Code that kernels of several ops share."""
