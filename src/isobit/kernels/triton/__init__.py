"""Parts of portable kernels, written in Triton."""
