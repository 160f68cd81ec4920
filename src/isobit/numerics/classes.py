"""Numerics classes: names for everything that determines the bits of a result.

A class fixes which numbers are added to which, in which precision, and where results are rounded. Two kernels
of one class return the same bits on the hardware for which the class is promised, whatever their tiles and
schedules are. docs/numerics.md has the full text of each; here is what code needs: the name, one paragraph,
and the hardware. A name includes its version: an order that changes gets a new name. Hardware that keeps the
order of a class but not its arithmetic has a class of its own, named after both: `chain16/sm_80`.
"""

from isobit.frame.numerics_class import Numerics

CHAIN16 = Numerics(
    "chain16",
    "A matrix product of bf16 or fp16 operands as one chain: k in ascending order, 16 at a time, each group"
    " joining the fp32 accumulator in one tensor-core step, the last group filled up with zeros; a bias is"
    " added to the fp32 sum; one rounding to nearest even to the output's dtype at the end.",
    "NVIDIA Hopper (sm_90); any CPU through the model",
)

SEG16_512 = Numerics(
    "seg16/512",
    "A matrix product of bf16 or fp16 operands in segments of 512 consecutive k, counted from the start of"
    " the sum or of each sequence: a fresh chain for every segment, and the segments' fp32 sums added in"
    " ascending order by fp32 additions that round to nearest even, beginning with the start value or +0.",
    "NVIDIA Hopper (sm_90); any CPU through the model",
)

#: Parts of k that are chains of their own in `tree8`.
LEAVES = 8

TREE8 = Numerics(
    "tree8",
    "A matrix product of bf16 or fp16 operands in eight leaves: k, a multiple of 8, is cut into eight equal"
    " parts, each a chain of its own from +0, its last group filled up with zeros; their fp32 sums are added"
    " as ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7)) by fp32 additions that round to nearest even; a"
    " bias is added to the fp32 sum; one rounding to the output's dtype at the end. Gradients that are sums"
    " over tokens are of seg16/512.",
    "NVIDIA Hopper (sm_90); any CPU through the model",
)

LSE_TRITON_1 = Numerics(
    "lse/triton-1",
    "A log-sum-exp over a row: 256 lanes, steps with one rescaling each, splits whose size is a function of"
    " the row's length alone, lanes and splits added by trees of neighbours, no contraction of products and"
    " sums; `exp2` and `log2` as Triton emits them for the device.",
    "NVIDIA GPUs through Triton, each architecture and Triton version for itself; proven on H200",
)

LSE_TRITON_8X1 = Numerics(
    "lse/triton-8x1",
    "The vocabulary, padded to P columns, is cut into eight shards of P / 8. Each is summed as a row of"
    " lse/triton-1 with as many columns, and the eight are folded as the splits of such a row are. So a"
    " shard's sums do not depend on who has the others.",
    "GPUs through Triton, each architecture and Triton version for itself",
)

LSE_TRITON_8X1_CPU = Numerics(
    "lse/triton-8x1/cpu",
    "The order of lse/triton-8x1 on a CPU: `exp2` and `log2` are numpy's.",
    "any CPU, each numpy version for itself",
)

LSE_1 = Numerics(
    "lse/1",
    "A log-sum-exp over fp32 logits as a tensor-core product leaves them in registers: tiles of 256 columns,"
    " four lanes of a row in each, 33 splits whose bounds are a function of the row's length alone, lanes"
    " joined at the end of a split and splits folded in ascending order; `exp2` and `log2` as Triton emits"
    " them. Logits that come from a product are those of chain16; gradients that are sums are of seg16/512.",
    "NVIDIA Hopper (sm_90), each Triton version for itself",
)

LSE_8X4 = Numerics(
    "lse/8x4",
    "lse/1 with other splits: the vocabulary, padded to P columns, is cut into eight shards of P / 8, each"
    " shard into tiles of 256 columns from its own start, and these into four splits whose bounds are a"
    " function of P alone; the 32 splits are folded in ascending order. dhidden of a shard is of seg16/512,"
    " and the eight shards are added as in tree8. So a shard's sums do not depend on who has the others.",
    "NVIDIA Hopper (sm_90), each Triton version for itself",
)

LSE_8X4_CPU = Numerics(
    "lse/8x4/cpu",
    "The order of lse/8x4 on a CPU: products are those of a Hopper GPU bit for bit, `exp2` and `log2` are"
    " numpy's.",
    "any CPU, each numpy version for itself",
)

LINEAR_LSE_TRITON_1 = Numerics(
    "linear-lse/triton-1",
    "A product and a log-sum-exp over it: one chain of the hardware's matrix steps over ascending features,"
    " tiles of 128 columns (64 for fp32 inputs) added by trees of halves with one rescaling a tile, splits of"
    " 2048 columns folded in ascending order, no contraction of products and sums; `exp2` and `log2` as"
    " Triton emits them for the device.",
    "GPUs through Triton, each architecture and Triton version for itself",
)

LINEAR_LSE_TRITON_8X4 = Numerics(
    "linear-lse/triton-8x4",
    "linear-lse/triton-1 with the splits of lse/8x4; dhidden is a chain for each of the eight shards of the"
    " vocabulary, and these are added as in tree8.",
    "GPUs through Triton, each architecture and Triton version for itself",
)

NO_CLASS = Numerics(
    "none",
    "Accuracy, contract and repeatability, without a promise about bits.",
    "any",
)
