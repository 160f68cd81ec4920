"""A tape leaves no trace: not in the process, whose other threads may record too, nor in memory."""

import subprocess
import sys
import threading

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from isobit.frame.replay import Tape


def test_threads_that_record_at_the_same_time_leave_the_process_as_it_was() -> None:
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with Tape():
            first_in.set()
            second_in.wait(60)
        first_out.set()

    def second() -> None:
        first_in.wait(60)
        with Tape():
            second_in.set()
            first_out.wait(60)

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not is_in_torch_dispatch_mode()


def test_a_tape_is_entered_on_its_own_thread_and_left_after_an_error() -> None:
    before = torch._C._len_torch_dispatch_stack()
    try:
        with Tape() as tape:
            assert torch._C._len_torch_dispatch_stack() == before + 1
            made = torch.empty(3)
            assert list(tape.new) == [made.data_ptr()]
            torch.ones(3)
            torch.empty(4)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert torch._C._len_torch_dispatch_stack() == before
    # There will be no plan, so nothing is held for one.
    assert not tape.new and not tape.made and "aten.ones" in str(tape.reason)


def test_a_tape_does_not_import_the_compiler() -> None:
    """It takes seconds, and would do so in the second call of a training."""
    code = """
import sys
import torch
from isobit.frame.replay import Tape
assert "torch._dynamo" not in sys.modules
with Tape():
    torch.empty(1)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
