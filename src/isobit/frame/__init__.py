"""What every op stands in: contract, choice of a backend, autograd, call plans, launches."""
