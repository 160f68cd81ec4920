"""Calls of the ops of mixtures of experts and of gated delta nets, for the stub of libcuda."""

from typing import Any

from replay_shapes import F32, INT32, INT64, Call, shape


def wanted(*names: str) -> dict[str, bool]:
    return {f"want_{name}": True for name in names}


# Experts


def _packed(**more: Any) -> Call:
    given = {"gate_up": shape(33, 2 * 96), "interleaved": True, "limit": 7.0, "alpha": 1.702}
    return Call("swiglu_packed_bwd" if more else "swiglu_packed", "triton", {**given, **more})


def _combine(**more: Any) -> Call:
    given = {"y": shape(66, 64), "weights": shape(33, 2, dtype=F32), "place": shape(33, 2, dtype=INT32)}
    return Call("combine_bwd" if more else "combine", "triton", {**given, **more})


EXPERTS = {
    "route": Call("route", "triton", {"logits": shape(33, 8), "top_k": 2, "normalize": True}),
    "route backward": Call("route_bwd", "triton", {
        "logits": shape(33, 8), "top_k": 2, "scoring": "softmax", "order": "softmax_topk",
        "normalize": True, "mask": None, "experts": shape(33, 2, dtype=INT32), "dweights": shape(33, 2),
    }),
    "rows of experts": Call("expert_rows", "triton", {"experts": shape(33, 2, dtype=INT32), "count": 8}),
    "spread": Call("spread", "triton", {"x": shape(33, 64), "place": shape(33, 2, dtype=INT32)}),
    "spread backward": Call("spread_bwd", "triton", {
        "place": shape(33, 2, dtype=INT32), "dy": shape(66, 64),
    }),
    "combine": _combine(),
    "combine backward": _combine(dout=shape(33, 64), **wanted("y", "weights")),
    "swiglu_packed": _packed(),
    "swiglu_packed backward": _packed(dout=shape(33, 96)),
}  # fmt: skip


# Gated delta nets


def _conv(**more: Any) -> Call:
    given: dict[str, Any] = {"x": shape(2, 33, 64), "weight": shape(64, 4), "bias": shape(64)}
    given |= {"activation": "silu", "initial_state": None, "first": None, "cu_seqlens": None}
    return Call("causal_conv1d_bwd" if more else "causal_conv1d", "triton", {**given, **more})


def _gates(**more: Any) -> Call:
    given = {"a": shape(33, 4), "b": shape(33, 4), "A_log": shape(4, dtype=F32), "dt_bias": shape(4)}
    return Call("delta_gates_bwd" if more else "delta_gates", "triton", {**given, **more})


def _rule(backend: str, **more: Any) -> Call:
    """A chunk and a part of one, from a state on."""
    given: dict[str, Any] = {name: shape(1, 66, 2, 64) for name in ("q", "k", "v")}
    given |= {"g": shape(1, 66, 2, dtype=F32), "beta": shape(1, 66, 2, dtype=F32), "scale": 0.1}
    given["initial_state"] = shape(1, 2, 64, 64, dtype=F32)
    return Call("gated_delta_rule_bwd" if "do" in more else "gated_delta_rule", backend, {**given, **more})


def _rule_bwd(backend: str) -> Call:
    more: dict[str, Any] = {"use_qk_l2norm_in_kernel": False, "state_v_first": False, "cu_seqlens": None}
    more |= {"inverse": shape(1, 66, 2, 64), "do": shape(1, 66, 2, 64), "dfinal_state": None}
    return _rule(backend, **more, **wanted("q", "k", "v", "g", "beta", "initial_state"))


def _states(backend: str) -> Call:
    given: dict[str, Any] = {name: shape(1, 66, 2, 64) for name in ("k", "w", "u")}
    given |= {"g": shape(1, 66, 2, dtype=F32), "initial_state": shape(1, 2, 64, 64, dtype=F32)}
    return Call("chunk_gated_delta_rule_fwd_h", backend, {**given, "output_final_state": True})


def _step(backend: str) -> Call:
    given: dict[str, Any] = {name: shape(3, 1, 2, 64) for name in ("q", "k", "v")}
    given |= {"g": shape(3, 1, 2, dtype=F32), "beta": shape(3, 1, 2, dtype=F32), "scale": 0.1}
    given |= {"slots": None, "lengths": None, "use_qk_l2norm_in_kernel": False}
    given |= {"start": shape(3, 1, 2, 64, 64, dtype=F32), "start16": shape(3, 1, 2, 64, 64)}
    given |= {name: shape(3, 1, 2, 64, 64) for name in ("k_rows", "bv_rows", "vn_rows")}
    given |= {"inverse": shape(3, 1, 2, 64, 64, dtype=F32), "place": shape(3, 5, dtype=INT32)}
    given |= {name: shape(3, 1, 2, 64, dtype=F32) for name in ("beta_rows", "gate_rows")}
    return Call("gated_delta_rule_step_rows", backend, given)


def _norm(**more: Any) -> Call:
    given = {"x": shape(33, 64), "weight": shape(64), "gate": shape(33, 64)}
    return Call("rms_norm_gated_bwd" if "dout" in more else "rms_norm_gated", "triton", {**given, **more})


DELTA_NETS = {
    "convolution": _conv(),
    "convolution backward": _conv(dout=shape(2, 33, 64), **wanted("x", "weight", "bias")),
    "convolution, decoding": Call("causal_conv1d_update", "triton", {
        "x": shape(3, 1, 64), "state": shape(3, 3, 64), "weight": shape(64, 4), "bias": None,
        "activation": "silu", "slots": shape(3, dtype=INT64),
    }),
    "gates": _gates(),
    "gates backward": _gates(
        dg=shape(33, 4, dtype=F32), dbeta=shape(33, 4), **wanted("a", "b", "A_log", "dt_bias")
    ),
    **{f"gated delta rule, {each}": _rule(each) for each in ("hopper", "triton")},
    **{f"gated delta rule backward, {each}": _rule_bwd(each) for each in ("hopper", "triton")},
    **{f"states, {each}": _states(each) for each in ("hopper", "triton")},
    **{f"decoding of the delta rule, {each}": _step(each) for each in ("hopper", "triton")},
    "gated norm": _norm(return_rstd=True),
    "gated norm backward": _norm(
        rstd=shape(33, dtype=F32), dout=shape(33, 64), **wanted("x", "weight", "gate")
    ),
}  # fmt: skip

#: What ranks share of a product.
SUBTREES = {
    f"leaves of a rank, {each}": Call(
        "det_gemm_subtree", each, {"a": shape(33, 128), "b": shape(128, 64), "leaves": 4}
    )
    for each in ("hopper-tree8", "triton-tree8")
}

LAYERS: dict[str, Call] = EXPERTS | DELTA_NETS | SUBTREES
