"""The law of compilation without a GPU."""

from typing import Any

from isobit.check.disassembly import disassembled
from isobit.check.pipelines import overwritten_operands
from isobit.check.sass import FAULTY_TARGET, faulty, unset_registers
from isobit.frame.device import triton_is_interpreted
from isobit.frame.launch import Recorder
from isobit.spec.compare import OutputCheck, failure, passed
from isobit.spec.trial import LawBroken, Trial, Unsupported

Key = tuple[str, str, str]
Compilation = tuple[str, Any, dict[str, Any]]  # name of the kernel, source, options


def compiles(trial: Trial) -> list[OutputCheck]:
    """Every kernel compiles for its targets, with or without a GPU in the machine. For the first target, and
    for all that were requested by name, in every recorded call. For the others only the call of each kernel
    with the most shared memory, since they have less of it. A check of all laws compiles one call of each
    kernel of the op, for other targets only the call with the most shared memory of all; and in the second
    dtype, which differs in conversions, each of them up to Triton's own code. If other backends launch all
    of them, one goes as far as that. Code for NVIDIA is read for what its assembler may have lost; in a check
    of all laws, code that has `wgmma`. Triton's own code is read for operands that are overwritten."""
    kernels = trial.proof.kernels.get(trial.backend)
    if kernels is None:
        raise Unsupported("plain PyTorch: nothing to compile")
    if triton_is_interpreted():
        raise LawBroken("kernels are interpreted in this process and cannot be compiled")
    targets = {n: t for n, t in kernels.by_name().items() if not trial.targets or n in trial.targets}
    if not targets:
        raise Unsupported(f"its kernels are for {', '.join(kernels.by_name())}")
    from triton.backends.compiler import GPUTarget

    recorder = Recorder()
    kernels.record(recorder, trial.case.dtype)
    if not recorder.launches:
        raise LawBroken("no launch was recorded")
    calls = {
        (name, source.hash(), str(options)): (name, source, options)
        for name, source, options in recorder.sources()
    }
    first, *others = targets
    known = False  # whether the cells of another backend compile all of its kernels
    if trial.brief:
        ones = {call[0]: key for key, call in reversed(calls.items())}  # the first call of each kernel
        calls = {key: calls[key] for key in reversed(ones.values())}
        own = _of_this_backend(trial, calls)
        calls, known = own or dict([*calls.items()][:1]), not own
    if trial.one_target or known:
        return [_to_triton_code(f"{call[0]} {first}", targets[first], *call[1:]) for call in calls.values()]
    checks: list[OutputCheck] = []
    to_read: dict[int, bytes] = {}  # code by the index of its check

    def shared_memory(target: str, name: str, source: Any, options: dict[str, Any]) -> int:
        """Shared memory of a compiled call; -1 if it does not compile."""
        what = f"{name} {target}"
        try:
            done = _compiled_for(GPUTarget(*targets[target]), source, options)
        except Exception as error:  # continue with the others; the row says which kernel failed
            checks.append(failure(what, f"{type(error).__name__}: {error}"))
            return -1
        # The fault does harm where `wgmma` takes an address.
        if target == FAULTY_TARGET and faulty() and ("wgmma" in done.asm["ptx"] or not trial.brief):
            to_read[len(checks)] = done.asm["cubin"]
        if overwritten := overwritten_operands(done.asm.get("ttgir", "")):
            checks.append(failure(what, f"{overwritten[0]} (see isobit.check.pipelines)"))
        else:
            checks.append(passed(what, f"{done.metadata.shared} bytes of shared memory"))
        return int(done.metadata.shared)

    taken = {key: shared_memory(first, *call) for key, call in calls.items()}
    # The last of each kernel is the largest; in a brief check the last of all.
    largest = {not trial.brief and key[0]: key for key in sorted(calls, key=lambda key: taken[key])}
    for target in others:
        for key in calls if trial.targets else largest.values():
            shared_memory(target, *calls[key])
    for at, code in zip(to_read, disassembled([*to_read.values()]), strict=True):
        if lost := unset_registers(code):
            what = f"{lost[0]} ({len(lost)} of them; see isobit.check.sass)"
            checks[at] = failure(checks[at].output, what)
    return checks


def _compiled_for(target: Any, source: Any, options: dict[str, Any]) -> Any:
    """As on such a GPU: kernels that ask which one they run on get this target, and not the machine's own."""
    import triton
    from triton.language import target_info

    own = target_info.current_target
    target_info.current_target = lambda: target
    try:
        return triton.compile(source, target=target, options=options)
    finally:
        target_info.current_target = own


def _of_this_backend(trial: Trial, calls: dict[Key, Compilation]) -> dict[Key, Compilation]:
    """Without kernels that a backend before this one launches too, whose cells compile them."""
    known = list(trial.proof.kernels)
    earlier = Recorder()
    for name in known[: known.index(trial.backend)]:
        trial.proof.kernels[name].record(earlier, trial.case.dtype)
    there = {id(kernel) for kernel, _, _ in earlier.launches}
    return {key: call for key, call in calls.items() if id(call[1].fn) not in there}


class _Enough(Exception):
    """A compilation went as far as it should."""


def _to_triton_code(what: str, target: Any, source: Any, options: dict[str, Any]) -> OutputCheck:
    """Compile a call without what takes most of the time: passes for GPUs, LLVM and the assembler. What a
    dtype does not fit shows before."""
    import triton
    from triton.backends.compiler import GPUTarget

    def enough(*_: Any) -> Any:
        raise _Enough

    def stages(*given: Any) -> Any:
        """As Triton calls it: with its stages, or with nothing for a part of the key of its cache."""
        if not given:
            return "up to ttir", "up to ttir"
        # Gluon's own code is for GPUs from the start.
        given[1]["ttgir" if "ttir" in given[1] else "llir"] = enough
        return None

    before = triton.knobs.runtime.add_stages_inspection_hook
    triton.knobs.runtime.add_stages_inspection_hook = stages
    try:
        with triton.knobs.compilation.scope():
            # Or Triton 3.6 would find what another law has compiled: there the hook is not part of its key.
            triton.knobs.compilation.always_compile = True
            _compiled_for(GPUTarget(*target), source, options)
    except _Enough:
        return passed(what, "up to Triton's own code")
    except Exception as error:
        return failure(what, f"{type(error).__name__}: {error}")
    finally:
        triton.knobs.runtime.add_stages_inspection_hook = before
    return failure(what, "its compilation has no stage of LLVM")
