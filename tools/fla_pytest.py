"""Runs FLA's own tests with isobit inside, from a checkout of FLA:

    python ../isobit/tools/fla_pytest.py tests/ops/test_gdn.py tests/ops/test_kda.py

The arguments are those of pytest, and `--backend` and `--whole` of `enable`. At the end it prints how many
calls isobit has served, and how many it has not and why. A run in which it has served none fails.
"""

import argparse
import sys
from collections.abc import Sequence

from isobit.integrations import fla, fla_whole
from isobit.integrations.patch import calls


def main(arguments: Sequence[str]) -> int:
    import pytest

    parser = argparse.ArgumentParser(prog="python tools/fla_pytest.py", add_help=False)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--whole")
    own, rest = parser.parse_known_args(arguments)
    sys.path.insert(0, "")  # as `python -m pytest` does: FLA's tests import from its checkout
    with fla.enable(own.backend, whole=own.whole) as on:
        status = int(pytest.main(rest))
    also = f" and {fla_whole.NAME} ({own.whole})" if own.whole else ""
    print(f"isobit ({on.backend}) served {calls(on.served)} of {fla.NAME}{also}")
    for reason, count in on.passed.most_common():
        print(f"FLA's own kernel served {count}: {reason}")
    if not on.served:
        print("FAILED: isobit has served no call, so this says nothing about it")
    return status if on.served else status or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
