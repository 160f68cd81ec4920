"""A product with a bias, in the registers of a `wgmma` accumulator.

Of a tile's columns a thread holds 8i + 2q and 8i + 2q + 1: neighbours, so that it reads their biases as one
word. It loads the words of a tile while the first step of the product is in flight, which hides the latency.
Until the product is complete they stay words: two 16-bit numbers take one register.
"""

from torch import Tensor

from isobit.kernels.hopper.lse import TILE, as_lanes, pairs_from
from isobit.kernels.hopper.pipeline import gl, gluon


@gluon.jit
def _words(bias, first, V):
    """The biases of a tile that begins at column `first` of V, by (row, i, lane): two in a word, the even
    column's below."""
    word = pairs_from(first)
    if bias.dtype.element_ty == gl.float32:
        words = bias.to(gl.pointer_type(gl.int64))
    else:
        words = bias.to(gl.pointer_type(gl.int32))
    return gl.load(words + word, mask=word < (V + 1) // 2, other=0)


@gluon.jit
def _numbers(words, bias):
    """The two numbers of each word in fp32, by (row, i, lane, parity)."""
    if bias.dtype.element_ty == gl.float32:
        even = words.to(gl.int32).to(gl.float32, bitcast=True)
        odd = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    elif bias.dtype.element_ty == gl.bfloat16:
        even = (words << 16).to(gl.float32, bitcast=True)
        odd = (words & -65536).to(gl.float32, bitcast=True)
    else:
        even = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        odd = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.join(even, odd), TILE, assert_trivial=True)


@gluon.jit
def multiply_add(pipe, acc, bias, first, V, stage, phase, WHICH: gl.constexpr):
    """`Pipe.multiply` for all steps, then the biases of a tile from the even column `first` of V on added in
    fp32; by (row, i, lane, parity). The bias must be one that `in_words` has returned, from an even column
    on."""
    acc, stage, phase = pipe.begin_chain(acc, stage, phase, WHICH)
    words = _words(bias, first, V)
    acc, stage, phase = pipe.finish_chain(acc, pipe.steps - 1, stage, phase, WHICH)
    return as_lanes(acc) + _numbers(words, bias), stage, phase


def in_words(bias: Tensor, V: int) -> Tensor:
    """A bias of which V numbers can be read two at a time: a copy if it begins in the middle of a word or
    ends in one."""
    if bias.data_ptr() % (2 * bias.element_size()) == 0 and (V % 2 == 0 or len(bias) > V):
        return bias
    copy = bias.new_zeros(V + V % 2)
    copy[:V] = bias[:V]
    return copy
