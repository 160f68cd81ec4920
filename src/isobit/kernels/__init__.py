"""What kernels of several ops share."""
