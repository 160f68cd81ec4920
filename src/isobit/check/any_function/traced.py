"""A function of rows inside `torch.compile` and in a CUDA graph: the bits of the plain call."""

from dataclasses import replace

import torch

from isobit.check.any_function.batch import Batch, needs_gpu
from isobit.check.any_function.function import Run
from isobit.spec.compare import OutputCheck
from isobit.spec.trial import LawBroken, Unsupported, cloned

#: In messages of PyTorch and Triton about what this machine lacks.
LACKS = ("C compiler", "C++ compiler", "Cxx", "not supported on Python", "cannot find -l")


def compiled(batch: Batch) -> list[OutputCheck]:
    """Compiled, with all rows and with some. On a GPU by inductor; on a CPU it is traced, and its gradient
    too, but no code is generated, which would take longer than all the rest."""
    mine = batch.mine
    compiler = "inductor" if mine.device.type == "cuda" else "aot_eager"
    torch.compiler.reset()
    try:
        ours = replace(batch, mine=replace(mine, function=torch.compile(mine.function, backend=compiler)))
        run = ours.mine.backward(mine.inputs, batch.cotangents)
        checks = batch.again("compiled", run)
        for size in {max(1, mine.count // 2), 1}:
            checks += ours.compare(f"compiled at {size} rows", mine.everyone()[:size])
    except (LawBroken, Unsupported):
        raise
    except Exception as error:
        if any(lack in str(error) for lack in LACKS):
            said = str(error).strip().partition("\n")[0]
            raise Unsupported(f"torch.compile cannot run here: {said}") from error
        raise
    finally:
        torch.compiler.reset()
    return checks


def captured(batch: Batch) -> list[OutputCheck]:
    """Captured once, with its gradients, and replayed with other rows. What cannot be captured, because it
    reads a value for example, has no wrong bits: the report says so."""
    mine = batch.mine
    needs_gpu(batch)
    static = cloned(mine.inputs)

    def step() -> Run:
        if not mine.graded:
            with torch.no_grad():
                return Run(mine.call(static))
        outputs, grads = mine.with_gradients(static, batch.cotangents)
        return Run({name: o.detach() for name, o in outputs.items()}, grads)

    stream = torch.cuda.Stream(mine.device)
    stream.wait_stream(torch.cuda.current_stream(mine.device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(mine.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            replayed = step()
    except (LawBroken, Unsupported):
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise Unsupported(f"it cannot be captured: {type(error).__name__}: {said}") from error
    moved = mine.select(mine.everyone().roll(1))
    with torch.no_grad():
        for name in mine.rows:
            static[name].copy_(moved[name])
    graph.replay()
    torch.cuda.synchronize(mine.device)
    eager = replace(batch, whole=mine.backward(moved, batch.cotangents))
    return eager.again("replayed with other rows", replayed)
