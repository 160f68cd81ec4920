"""Parts of kernels for Hopper, written in Gluon."""
