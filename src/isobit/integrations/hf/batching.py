"""transformers' continuous batching for a model under `zero_drift`.

    zero_drift(model)
    config = ContinuousBatchingConfig(return_logprobs=True)
    outputs = model.generate_batch(prompts, continuous_batching_config=config)
    outputs["req_0"].logprobs

`generate_batch`, and every other way into continuous batching, makes a manager by `init_continuous_batching`.
`zero_drift` replaces that method on the model. The manager is transformers' own. Three things change in it:

- attention is `paged.attend`, until the manager stops;
- decoding may read pages in place, which transformers allows for FlashAttention alone;
- `logprobs` are those of `token_logps`. transformers computes them from rounded and filtered logits.

The generation loop runs in a thread of its own. An error there ends it, and transformers logs it and returns
what it has. Here it is raised when the manager stops, and so by `generate_batch`.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations.hf import paged
from isobit.integrations.hf.attention import NAME, PAGED
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.logps import Head, check_head
from isobit.ops.attention.op import HEAD_SIZES

#: The method of a model that makes a manager of continuous batching; and where a model keeps one for later.
MAKES, KEPT = "init_continuous_batching", "_cached_continuous_batching_manager"

#: `isobit.attention` reads pages of a multiple of so many keys.
PAGE = 16

MODULE = "transformers.generation.continuous_batching"


class Makes:
    """Replaces the method `MAKES` on a model, with its arguments. It does not keep the model alive. In a copy
    of the model it is the copy's; for a model that was loaded from a file, `zero_drift` makes a new one."""

    def __init__(self, model: Any = None) -> None:
        self.model: Any = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Makes":
        return Makes(None if self.model is None else memo.get(id(self.model())))

    def __reduce__(self) -> Any:
        return Makes, ()

    def __call__(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        model = None if self.model is None else self.model()
        if model is None:
            raise HFError("isobit.integrations.hf: continuous batching: call zero_drift(model) again first")
        return init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)


@torch.no_grad()
def init_continuous_batching(
    model: Any, generation_config: Any, continuous_batching_config: Any, workload_hints: Any
) -> Any:
    """A manager of a model under `zero_drift`."""
    wanted = continuous_batching_config or _default(generation_config or model.generation_config)
    kept = getattr(model, KEPT, None)
    if kept is not None and engine_of(kept) is None:
        raise _refusal(model, f"it has a manager from before zero_drift: call destroy{KEPT} first")
    if (reason := why_not(model, wanted)) is not None:
        raise _refusal(model, reason)
    head = check_head(model) if wanted.return_logprobs else None
    paged.register()
    _name_attention(model, PAGED)
    try:
        manager = getattr(type(model), MAKES)(model, generation_config, wanted, workload_hints)
        manager._original_attn_impl = NAME  # what it restores when it stops
        if manager is not kept:
            if (reason := _why_not_resolved(manager)) is not None:
                raise _refusal(model, reason)
            blocks = _blocks(model, wanted, workload_hints)
            manager.continuous_batching_config.max_blocks_per_request = blocks
            Engine(manager, head)
    except BaseException:
        _name_attention(model, NAME)
        raise
    return manager


def _default(generation_config: Any) -> Any:
    """What transformers takes if no configuration is given."""
    given = getattr(generation_config, "continuous_batching_config", None)
    return given or import_module("transformers.generation").ContinuousBatchingConfig()


def _name_attention(model: nn.Module, name: str) -> None:
    """Not by `set_attn_implementation`, which would look for an installed FlashAttention."""
    configs = (vars(m).get("config") for m in model.modules())
    for config in {id(c): c for c in configs if c is not None}.values():
        config._attn_implementation = name


# What is refused


def has_windows(model: Any) -> bool:
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:
        return getattr(model.config, "sliding_window", None) is not None
    return paged.SLIDING in kinds


def why_not(model: Any, wanted: Any) -> str | None:
    """Why continuous batching cannot serve a model that `zero_drift` serves, or None."""
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"its cache would be {model.dtype}; cast the model to bf16 or fp16"
    allocators = hasattr(import_module(f"{MODULE}.cache"), "ATTN_TYPE_TO_ALLOCATOR")
    if has_windows(model) and not allocators:
        version = import_module("transformers").__version__
        return f"it has sliding windows, of which transformers {version} loses keys; 5.22 is tested"
    if wanted.return_logprobs and wanted.per_request_processors:
        return "return_logprobs needs one temperature for all requests: leave out per_request_processors"
    return None


def _why_not_resolved(manager: Any) -> str | None:
    """The same for what only a manager can tell."""
    config = manager.continuous_batching_config
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        return "compiled code rounds in other places than eager code; leave out what compiles"
    if manager.distributed_helper.tp_size > 1:
        return "tensor parallelism is not supported"
    return None


def _refusal(model: Any, reason: str) -> HFError:
    return HFError(f"isobit.integrations.hf: continuous batching of {type(model).__name__}: {reason}")


def _blocks(model: Any, wanted: Any, hints: Any) -> int:
    """How many pages a request can have that are read in place; 0 if `isobit.attention` cannot read them.
    transformers has a number for FlashAttention on a GPU, and 0 for others."""
    rules, wanted = import_module(f"{MODULE}.initialization"), deepcopy(wanted)
    rules.resolve_using_hints(wanted, hints)
    rules.resolve_without_hints(wanted)
    page = getattr(wanted, "page_size", None) or wanted.block_size
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reads = page % PAGE == 0 and size in HEAD_SIZES and not has_windows(model)
    return wanted.max_blocks_per_request if reads else 0


# In a manager


def engine_of(manager: Any) -> "Engine | None":
    engine = getattr(vars(manager).get("stop"), "__self__", None)
    return engine if isinstance(engine, Engine) else None


#: Outputs, in a block of `recording`.
_recorded: ContextVar[list[Any] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Any]]:
    """The outputs of requests that are received in this block, for example by `generate_batch`."""
    outputs: list[Any] = []
    before = _recorded.set(outputs)
    try:
        yield outputs
    finally:
        _recorded.reset(before)


class Engine:
    """What replaces methods of a manager, and the forward of its model runner."""

    def __init__(self, manager: Any, head: Head | None) -> None:
        generation, self.model = manager.generation_config, manager.model
        sampled = bool(getattr(generation, "do_sample", False))
        self.head = head  # None if no log-probabilities are requested
        self.temperature = float(generation.temperature or 1.0) if sampled else 1.0
        self.error: BaseException | None = None
        self.own_create, manager._create_batch_processor = manager._create_batch_processor, self.create
        self.own_fail, manager._handle_critical_error = manager._handle_critical_error, self.fail
        self.own_stop, manager.stop = manager.stop, self.stop
        self.own_get, manager.get_result = manager.get_result, self.get_result

    def create(self) -> Any:
        """The processor of batches, which has the model runner."""
        try:
            processor = self.own_create()
        except BaseException:  # then nobody stops the manager
            _name_attention(self.model, NAME)
            raise
        runner = processor.model_runner
        if "_forward_process_and_sample" not in vars(runner):
            own = runner._forward_process_and_sample
            runner._forward_process_and_sample = partial(self.step, runner, own)
        return processor

    def fail(self, error: BaseException, processor: Any) -> None:
        self.error = error
        self.own_fail(error, processor)

    def stop(self, *args: Any, **options: Any) -> None:
        self.own_stop(*args, **options)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def get_result(self, *args: Any, **options: Any) -> Any:
        result, kept = self.own_get(*args, **options), _recorded.get()
        if result is not None and kept is not None:
            kept.append(result)
        return result

    def step(
        self, runner: Any, own: Any, model: Any, given: dict[str, Any], carry_over: Tensor, before: Tensor,
        output: Tensor,
    ) -> None:  # fmt: skip
        """One forward and its sampling, with transformers' arguments. `output` gets tokens, and below them
        log-probabilities. All of this may be captured in a graph."""
        plan = paged.plan_of(given, runner.cache, padded=runner.pad_inputs)
        if self.head is None:
            own(model, given | {"isobit_plan": plan}, carry_over, before, output)
            return
        read: list[Tensor] = []
        hook = self.head.linear.register_forward_pre_hook(lambda module, args: read.append(args[0]))
        try:
            own(model, given | {"isobit_plan": plan}, carry_over, before, output)
        finally:
            hook.remove()
        rows = given["logits_indices"]
        states = read[0][0] if "logits_to_keep" in given else read[0][0].index_select(0, rows)
        logp = self.logps(states, output[0, : len(rows)])
        output[1, : len(rows)].copy_(logp.view(torch.int32))

    def logps(self, states: Tensor, tokens: Tensor) -> Tensor:
        assert self.head is not None
        if len(tokens) == 1 and not states.is_cuda:  # torch multiplies a single row by another routine
            return self.logps(states.repeat(2, 1), tokens.repeat(2))[:1]
        return self.head.logps(states, tokens, temperature=self.temperature)
