"""What removes a difference that a kind of module adds."""

#: The call of isobit by kind of module.
REMEDIES = {
    "linear": "isobit.det_linear: isobit.nn.swap_linear(model) or zero_drift",
    "router": "isobit.det_linear and isobit.route, if it is one of a mixture of experts: zero_drift",
    "attention": 'isobit.attention: attn_implementation="isobit" or zero_drift',
    "norm": "isobit.rms_norm, if it is an RMSNorm: zero_drift",
    "layer norm": "nothing of isobit: it has RMSNorm, no LayerNorm",
    "quantised": "nothing of isobit: a quantised layer; its own kernels decide",
    "rope": "isobit.rope, if queries and keys are rotated as in Llama",
    "activation": "isobit.swiglu, if it is the SiLU of a gate: its product is computed with it",
    "own code": "zero_drift, if it is that of experts or of a gated delta net; else look at this module",
}
NOTHING = "nothing of isobit: look at this module"


def remedy(kind: str) -> str:
    return REMEDIES.get(kind, NOTHING)
