"""Which requests of a batch are computed by one call of attention. It changes no bit.

A batch of vLLM has requests that decode, with one token each, and requests whose prompt is read, in one piece
or in chunks. They differ in what is fast:

    decoding    one query a sequence: keys are split over programs, and lengths are read on the device, so
                that a CUDA graph can replay it for other lengths
    chunks      some queries, and older keys in pages
    prompts     no older keys: keys and values are those of the batch, and need not be read from pages

vLLM's runner puts them in this order if a builder has `reorder_batch_threshold = 1`. Groups are runs of
requests, so in another order they are only fewer.
"""

from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

#: The keys of a call with chunks are rounded up to this many, so that calls have few different sizes.
ROUNDED_TO = 1024


class Group(NamedTuple):
    """Consecutive requests, and their tokens."""

    requests: slice
    tokens: slice
    starts: Tensor | None  # of each request among these tokens, and their end; None if each has one token
    keys: int | None  # that a request may have at most; None if that is not known
    prompts: bool = False  # without older keys


def groups_of(batch: Any) -> tuple[Group, ...]:
    """The groups of a batch, which is vLLM's `CommonAttentionMetadata`."""
    requests, tokens = batch.num_reqs, batch.num_actual_tokens
    if batch.max_query_len == 1 and requests == tokens:  # also with padding: the only kind in a graph
        return (Group(slice(0, requests), slice(0, tokens), None, None),)
    starts = batch.query_start_loc_cpu.tolist()
    queries = [after - start for start, after in pairwise(starts)]
    most: Tensor | None = batch.seq_lens_cpu_upper_bound
    lengths = [None] * requests if most is None else most.tolist()
    decoding = next((i for i, n in enumerate(queries) if n != 1), requests)
    prompts = requests
    while prompts > decoding and lengths[prompts - 1] == queries[prompts - 1]:
        prompts -= 1
    keys = -(-batch.max_seq_len // ROUNDED_TO) * ROUNDED_TO

    def group(first: int, end: int, of_prompts: bool) -> Group:
        own = batch.query_start_loc[first : end + 1]
        own = own if first == 0 else own - starts[first]
        return Group(slice(first, end), slice(starts[first], starts[end]), own, keys, of_prompts)

    groups = []
    if decoding:
        groups.append(Group(slice(0, decoding), slice(0, decoding), None, None))
    if decoding < prompts:
        groups.append(group(decoding, prompts, False))
    if prompts < requests:
        groups.append(group(prompts, requests, True))
    return tuple(groups)
