"""`isobit demo`, GRPO from scratch: `grpo.py` is the script to read, `policy.py` has the transformer."""
