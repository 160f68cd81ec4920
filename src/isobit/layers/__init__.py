"""Layers of `torch.nn` made of ops. `isobit.nn` has their public names."""
