"""Times the candidates of a rule for tiles on a GPU, and fits the constants of its time model to the times.

    PYTHONPATH=tools python -m tile_model.measure chain16 times.json   on the GPU, ten minutes
    PYTHONPATH=tools python -m tile_model.fit times.json               anywhere, half a minute

Which rule it is, `problem.PROBLEMS` says. How to use the two: docs/dev/hopper.md.
"""
