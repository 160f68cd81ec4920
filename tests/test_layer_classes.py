"""Guards the map from layers to numerics classes: which class a layer gets, what is refused, that a saved map
gives the same bits again, what is proposed, and that merged layers have the bits of the separate ones."""

import doctest
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isobit
from isobit import ContractError, det_linear
from isobit.layers import propose
from isobit.layers.propose import proposed_class
from isobit.nn import DetLinear, merged_class, propose_classes, swap_linear
from isobit.numerics import CHAIN16, TREE8

BF16 = torch.bfloat16
CLASSES = (str(CHAIN16), str(TREE8))
pytestmark = pytest.mark.filterwarnings("ignore:isobit. det_gemm")  # that it is slow here is known


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP(), nn.Linear(64, 24)).to(BF16)


NAMES = [f"{i}.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")] + ["2"]


def chosen(*tree8: str) -> dict[str, str]:
    """The class of every layer, if these are tree8."""
    return {name: str(TREE8 if name in tree8 else CHAIN16) for name in NAMES}


# Maps


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        (None, chosen()),
        ("tree8", chosen(*NAMES)),
        (TREE8, chosen(*NAMES)),
        ({}, chosen()),
        ({"0.down_proj": "tree8"}, chosen("0.down_proj")),
        ({"*.down_proj": TREE8}, chosen("0.down_proj", "1.down_proj")),
        ({"1.*": "tree8", "1.up_proj": "chain16"}, chosen("1.gate_proj", "1.down_proj")),
        ({"1.up_proj": "chain16", "*": "tree8"}, chosen(*(set(NAMES) - {"1.up_proj"}))),
        ({"1.*": "tree8", "*.down_proj": "tree8"}, chosen(*NAMES[3:6], "0.down_proj")),
    ],
)
def test_names_come_before_patterns_and_the_rest_is_chain16(numerics: Any, expected: dict[str, str]) -> None:
    m, wide = model(), {"out_dtype": torch.float32}  # 16 bits would hide the order of a short sum
    swap = swap_linear(m, numerics=numerics, out_dtype=torch.float32)
    assert swap.classes == expected
    x = randn(3, 96)
    for name in ("0.down_proj", "1.down_proj"):
        layer: Any = m.get_submodule(name)
        bits = {each: det_linear(x, layer.weight, layer.bias, numerics=each, **wide) for each in CLASSES}
        assert [each for each in CLASSES if torch.equal(layer(x), bits[each])] == [expected[name]]
    swap.undo()
    assert swap.classes == {} and type(m[2]) is nn.Linear


def test_classes_have_other_bits_and_a_saved_map_the_same_ones() -> None:
    def run(numerics: Any) -> tuple[dict[str, str], list[Tensor]]:
        """The classes of the layers, the output and all gradients."""
        m, x = model(), randn(5, 64).float()
        swap = swap_linear(m, operand_dtype=BF16, out_dtype=torch.float32, numerics=numerics)
        y = m(x)
        y.square().sum().backward()
        return swap.classes, [y, *(p.grad for p in m.parameters() if p.grad is not None)]

    classes, bits = run({"*.down_proj": "tree8", "2": "tree8"})
    again = run(json.loads(json.dumps(classes)))
    assert again[0] == classes == chosen("0.down_proj", "1.down_proj", "2") and len(bits) == 11
    assert all(torch.equal(ours, other) for ours, other in zip(bits, again[1], strict=True))
    assert not torch.equal(bits[0], run(None)[1][0])


@pytest.mark.parametrize(
    ("numerics", "message"),
    [
        ({"0.down": "tree8"}, "'0.down'): no linear layer has this name; there are: 0.gate_proj, 0.up_proj"),
        ({"*.o_proj": "tree8"}, r"swap_linear(numerics: '*.o_proj'): no linear layer has this name"),
        ({"0": "tree8"}, "swap_linear(numerics: '0'): no linear layer has this name"),  # an MLP
        (
            {"*.up_proj": "tree9"},
            "swap_linear(numerics: 'tree9'): no class of products; known: chain16, tree8",
        ),
        ({"*.up_proj": None}, "swap_linear(numerics: 'None'): no class of products"),
        ({"*.up_proj": "seg16/512"}, "swap_linear(numerics: 'seg16/512'): no class of products"),
        (
            {"0.*": "tree8", "*.up_proj": "chain16"},
            "numerics: 0.up_proj matches '0.*', of class tree8 and '*.up_proj', of class chain16; give it by",
        ),
    ],
)
def test_what_is_no_class_or_no_layer_is_refused_and_nothing_is_swapped(numerics: Any, message: str) -> None:
    m = model()
    with pytest.raises(ContractError) as error:
        swap_linear(m, numerics=numerics)
    assert message in str(error.value)
    assert not any(isinstance(layer, DetLinear) for layer in m.modules())


def test_a_k_that_cannot_be_cut_is_refused_before_a_forward() -> None:
    m = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 12))
    with pytest.raises(
        ContractError, match=r"swap_linear\(numerics: 'tree8'\): 0: class tree8 cuts k into 8"
    ):
        swap_linear(m, numerics="tree8")
    assert type(m[1]) is nn.Linear
    assert swap_linear(m, where=["1"], numerics="tree8").classes == {"1": "tree8"}
    with pytest.raises(ContractError, match=r"DetLinear\(numerics: 'tree8/sm_80'\): .*in_features=12 is not"):
        DetLinear(12, 16, numerics="tree8/sm_80")
    assert DetLinear(16, 12, numerics="tree8/sm_80").numerics == "tree8/sm_80"  # of another GPU than is here


def test_a_forced_backend_has_its_class() -> None:
    m = model()
    assert swap_linear(m, where=["2"], backend="model-tree8").classes == {"2": "tree8"}
    assert swap_linear(m, where=["0.up_proj"], backend="model").classes == {"0.up_proj": "chain16"}


class Adapted(nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})


def test_a_map_of_a_model_fits_when_an_adapter_wraps_its_layers() -> None:
    m, classes = model(), {"0.down_proj": "tree8", "*.up_proj": "tree8"}
    m[0].down_proj, m[1].up_proj = Adapted(m[0].down_proj), Adapted(m[1].up_proj)
    assert list(propose_classes(m)) == NAMES
    found = swap_linear(m, numerics=classes).classes
    assert {name for name, each in found.items() if each == "tree8"} == {
        "0.down_proj.base_layer", "0.up_proj", "1.up_proj.base_layer",
    }  # fmt: skip
    assert "0.down_proj.lora_A.default" in found


# Merged layers


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize(
    ("K", "sizes", "bias"),
    [(200, (64, 16, 16), torch.float32), (200, (64, 16, 16), BF16), (72, (40, 40), None)],
)
def test_merged_layers_have_the_bits_of_the_separate_ones(
    numerics: str, K: int, sizes: tuple[int, ...], bias: torch.dtype | None
) -> None:
    """q, k and v with a bias, gate and up without; and the gradients of their weights."""
    x, dy = randn(7, K), randn(7, sum(sizes), seed=1).float()
    options: Any = {"numerics": numerics, "out_dtype": torch.float32}
    weights = [randn(N, K, seed=2 + i).requires_grad_() for i, N in enumerate(sizes)]
    biases = [None if bias is None else randn(N, seed=9).to(bias) for N in sizes]
    separate = [det_linear(x, w, b, **options) for w, b in zip(weights, biases, strict=True)]
    torch.autograd.backward(separate, dy.split(sizes, -1))

    whole = torch.cat([w.detach() for w in weights]).requires_grad_()
    whole_bias = None if bias is None else torch.cat(biases)  # type: ignore[arg-type]
    merged = det_linear(x, whole, whole_bias, **options)
    merged.backward(dy)
    assert torch.equal(merged, torch.cat(separate, -1))
    assert torch.equal(whole.grad, torch.cat([w.grad for w in weights]))  # type: ignore[arg-type,misc]
    (other,) = set(CLASSES) - {numerics}
    assert not torch.equal(merged, det_linear(x, whole, whole_bias, **options | {"numerics": other}))


def test_layers_of_one_class_are_merged_and_others_are_not() -> None:
    classes = {"*.q_proj": "tree8", "a.k_proj": TREE8, "b.k_proj": "chain16"}
    assert merged_class(classes, ["a.q_proj", "a.k_proj"]) == "tree8"
    assert merged_class(classes, ["b.v_proj", "b.k_proj"]) == "chain16"
    assert merged_class("tree8", ["a.q_proj", "b.k_proj"]) == "tree8"
    assert merged_class(None, ["a.q_proj"]) == "chain16"
    with pytest.raises(ContractError) as error:
        merged_class(classes, ["b.q_proj", "b.k_proj", "b.v_proj"])
    assert str(error.value) == (
        "merged_class: b.q_proj is of class tree8 and b.k_proj of chain16: layers can only be merged if they "
        "are of one class"
    )
    with pytest.raises(ContractError, match="needs at least one layer"):
        merged_class(classes, [])


# Proposals


def decoder(D: int, heads: int, kv_heads: int, size: int, F: int) -> nn.ModuleDict:
    """A layer of a model, by its sizes."""
    Q, KV = heads * size, kv_heads * size
    layers = {
        "self_attn": {"q_proj": (D, Q), "k_proj": (D, KV), "v_proj": (D, KV), "o_proj": (Q, D)},
        "mlp": {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)},
    }
    return nn.ModuleDict({
        part: nn.ModuleDict({name: nn.Linear(*sizes, device="meta") for name, sizes in inside.items()})
        for part, inside in layers.items()
    })  # fmt: skip


#: Qwen 2.5 0.5B, Qwen 3 4B, Llama 3 8B, Qwen 3 32B, Llama 3 70B; and one with many heads and a narrow state.
MODELS = {
    "0.5B": decoder(896, 14, 2, 64, 4864),
    "4B": decoder(2560, 32, 8, 128, 9728),
    "8B": decoder(4096, 32, 8, 128, 14336),
    "32B": decoder(5120, 64, 8, 128, 25600),
    "70B": decoder(8192, 64, 8, 128, 28672),
    "narrow": decoder(1024, 48, 8, 128, 6144),
}


def test_long_sums_of_few_columns_are_proposed() -> None:
    proposed = {
        size: [name for name, each in propose_classes(m).items() if each == "tree8"]
        for size, m in MODELS.items()
    }
    assert proposed["0.5B"] == ["mlp.down_proj"]
    assert proposed["narrow"] == ["self_attn.o_proj", "mlp.down_proj"]
    for name, m in MODELS.items():
        classes = propose_classes(m)
        assert len(classes) == 7 and json.loads(json.dumps(classes)) == classes, name
        swap_linear(m, numerics=classes).undo()


def test_layers_that_engines_merge_get_the_class_of_all_their_columns() -> None:
    m = decoder(4096, 8, 1, 64, 4096)
    alone, together = propose_classes(m, merged=()), propose_classes(m)
    small = [f"self_attn.{name}_proj" for name in "kv"]
    assert [alone[name] for name in small] == ["tree8"] * 2 and alone["mlp.up_proj"] == "chain16"
    assert [together[name] for name in small] == ["tree8"] * 2  # 640 columns
    m = decoder(4096, 16, 1, 64, 4096)
    alone, together = propose_classes(m, merged=()), propose_classes(m)
    assert [alone[name] for name in small] == ["tree8"] * 2 and alone["self_attn.q_proj"] == "tree8"
    assert [together[name] for name in small] == ["chain16"] * 2  # 1152 columns
    for each in (*MODELS.values(), m):
        for group in propose.MERGED[:2]:
            part = "mlp" if "up_proj" in group else "self_attn"
            merged_class(propose_classes(each), [f"{part}.{name}" for name in group])


def test_layers_that_the_kernels_cannot_cut_or_that_are_not_siblings_are_left_alone() -> None:
    odd = nn.ModuleDict({"a": nn.Linear(4104, 64), "b": nn.Linear(4096, 72), "c": nn.Linear(4096, 64)})
    assert propose_classes(odd) == {"a": "chain16", "b": "chain16", "c": "tree8"}
    crossed = nn.ModuleDict({"k_proj": nn.Linear(4096, 64), "v_proj": nn.Linear(64, 4096)})  # two inputs
    assert propose_classes(crossed) == {"k_proj": "tree8", "v_proj": "chain16"}
    assert propose_classes(nn.Linear(4096, 64)) == {"": "tree8"}


def test_the_docstring_has_the_limits_of_the_rule() -> None:
    said = " ".join((propose_classes.__doc__ or "").split())
    rule = f"K is at least {propose.LEAST_K} and at least {propose.LEAST_K_PER_COLUMN} times its N"
    assert f"{rule}, and N at most {propose.MOST_COLUMNS}." in said


def test_the_rule_is_near_what_the_models_of_time_say() -> None:
    """For what is computed at once in each of these models: it costs little where it is wrong, and gains
    where it proposes tree8."""
    from isobit.ops.det_gemm.kernels_hopper import choose_tile
    from isobit.ops.det_gemm.plans_hopper_tree import choose_plan

    layers = {(4096, 64), (4096, 640), (8192, 1024)}
    for m in MODELS.values():
        sizes = {name: (layer.in_features, layer.out_features) for name, layer in m.named_modules()
                 if isinstance(layer, nn.Linear)}  # fmt: skip
        layers |= {sizes["self_attn.o_proj"], sizes["mlp.down_proj"]}
        layers |= {(sizes["mlp.up_proj"][0], 2 * sizes["mlp.up_proj"][1])}
        layers |= {(sizes["self_attn.q_proj"][0], sum(sizes[f"self_attn.{n}_proj"][1] for n in "qkv"))}
    cost: dict[tuple[int, int], float] = {}
    for K, N in layers:
        tree, chain = (
            math.prod(choose(M, N, K, 132)[1] for M in (8, 40, 72, 144)) ** (1 / 4)
            for choose in (choose_plan, choose_tile)
        )
        cost[K, N] = (tree if proposed_class(K, N) == TREE8 else chain) / min(tree, chain)
        assert proposed_class(K, N) == CHAIN16 or tree < chain, (K, N)
    assert max(cost.values()) < 1.05, cost
    assert math.prod(cost.values()) ** (1 / len(cost)) < 1.02


@pytest.mark.parametrize("thing", [merged_class, propose_classes])
def test_examples_run(thing: object) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, "nn")
    output: list[str] = []
    assert test.examples and doctest.DocTestRunner().run(test, out=output.append).failed == 0, "".join(output)
    assert isobit.nn.propose_classes is propose_classes
