"""The host side of kernels, and plain PyTorch that several references share."""
