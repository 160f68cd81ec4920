"""Pieces that kernels of several ops share."""
