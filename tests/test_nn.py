"""Guards the layers: what `DetLinear` shares with `nn.Linear`, and that swapping layers of a model changes
their arithmetic and nothing else; on the LM head of a Hugging Face model too."""

import copy
import doctest
import pickle

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn

import isobit
from isobit import ContractError, det_linear
from isobit.nn import DetLinear, in_forward, swap_linear

BF16 = torch.bfloat16


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator()).to(BF16)


class Residual(nn.Module):
    """Linear layers at two depths, two of them with one weight, and one that is more than an `nn.Linear`."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.odd = self.Scaled(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.odd(x + self.block(x)))


def model() -> Residual:
    torch.manual_seed(0)
    return Residual().to(BF16)


PLAIN = ["block.0", "block.2", "head"]


# The layer


def test_it_is_a_linear_layer() -> None:
    layer = DetLinear(6, 4, dtype=BF16, numerics="chain16", out_dtype=torch.float32, backend="model")
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(nn.Linear(6, 4).state_dict())
    assert repr(layer) == (
        "DetLinear(in_features=6, out_features=4, bias=True, out_dtype=torch.float32, numerics='chain16', "
        "backend='model')"
    )
    x = randn(2, 3, 6)
    expected = det_linear(x, layer.weight, layer.bias, out_dtype=torch.float32)
    assert torch.equal(layer(x), expected) and expected.dtype == torch.float32
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), expected) and twin.numerics == "chain16"
    assert DetLinear(6, 4, bias=False, dtype=BF16)(x).shape == (2, 3, 4)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 2, 3)])
def test_the_output_may_be_modified_in_place(lead: tuple[int, ...]) -> None:
    """As after an `nn.Linear`, whatever view a backend made its result by."""
    layer, x = DetLinear(16, 8, dtype=BF16), randn(*lead, 16)
    gradients = []
    for relu in (nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU(inplace=True)):
        relu(layer(x)).sum().backward()
        gradients.append(layer.weight.grad)
        layer.weight.grad = None
    assert gradients[0] is not None and gradients[0].any()
    assert all(torch.equal(gradients[0], each) for each in gradients[1:] if each is not None)


def test_state_dicts_are_interchangeable_with_linear() -> None:
    theirs, ours = nn.Linear(6, 4, dtype=BF16), DetLinear(6, 4, dtype=BF16)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())


def test_from_linear_shares_the_parameters() -> None:
    theirs = nn.Linear(6, 4, dtype=BF16).eval()
    ours = DetLinear.from_linear(theirs, numerics="chain16")
    assert ours.weight is theirs.weight and ours.bias is theirs.bias and not ours.training
    ours(randn(3, 6)).sum().backward()
    assert theirs.weight.grad is not None
    assert DetLinear.from_linear(nn.Linear(6, 4, bias=False)).bias is None
    with pytest.raises(ContractError, match=r"it is a Scaled, which may do more than an nn\.Linear"):
        DetLinear.from_linear(Residual.Scaled(3, 3))


def test_fp32_parameters_need_autocast() -> None:
    layer = DetLinear(6, 4)
    with pytest.raises(ContractError) as error:
        layer(torch.zeros(2, 6))
    assert str(error.value) == (
        "DetLinear(weight: [4, 6] fp32): parameters must be bf16 or fp16; call .to(torch.bfloat16) on the "
        "module, or run it under torch.autocast"
    )
    x = randn(2, 6).float()
    with torch.autocast("cpu", dtype=BF16):
        found = layer(x)
    rounded = copy.deepcopy(layer).to(BF16)
    assert found.dtype == BF16 and torch.equal(found, rounded(x.to(BF16)))
    found.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_operands_are_rounded_to_their_dtype_with_and_without_autocast() -> None:
    layer = nn.Linear(6, 4)
    swap = swap_linear(layer, operand_dtype=BF16, out_dtype=torch.float32)
    assert repr(layer).endswith("operand_dtype=torch.bfloat16, out_dtype=torch.float32)")
    x = randn(2, 6).float().requires_grad_()
    expected = isobit.det_linear(x, layer.weight, layer.bias, operand_dtype=BF16, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        under_autocast = layer(x)
    assert torch.equal(layer(x), expected) and torch.equal(under_autocast, expected)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32 and x.grad is not None
    swap.undo()
    assert type(layer) is nn.Linear and "operand_dtype" not in vars(layer)
    made = DetLinear.from_linear(layer, operand_dtype=BF16, out_dtype=torch.float32)
    assert torch.equal(made(x), expected)
    with pytest.raises(ContractError, match=r"DetLinear\(operand_dtype: torch.float32\): must be bf16"):
        DetLinear(6, 4, operand_dtype=torch.float32)


def test_it_compiles() -> None:
    torch._dynamo.reset()
    layer = DetLinear(6, 4, dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = randn(5, 6)
    assert torch.equal(compiled(x), layer(x))
    torch._dynamo.reset()


# Swapping


def test_a_swap_changes_the_class_of_plain_layers_and_nothing_else() -> None:
    m, ids = model(), torch.arange(5)
    before, layers, calls = dict(m.state_dict(keep_vars=True)), dict(m.named_modules()), []
    m.head.register_forward_hook(lambda *_: calls.append("hook"))
    expected = m(ids)
    with pytest.warns(UserWarning, match="odd: it is a Scaled, which may do more than an nn.Linear"):
        swap = swap_linear(m, numerics="chain16")
    assert swap.swapped == PLAIN and list(swap.skipped) == ["odd"]
    assert [type(m.get_submodule(n)) for n in PLAIN] == [DetLinear] * 3 and type(m.odd) is Residual.Scaled
    assert dict(m.named_modules()) == layers and m.head.weight is m.embed.weight
    assert all(before[n] is p for n, p in m.state_dict(keep_vars=True).items())
    torch.testing.assert_close(m(ids), expected, rtol=0.05, atol=0.05)
    assert calls == ["hook", "hook"]
    swap.undo()
    swap.undo()
    assert torch.equal(m(ids), expected)
    assert [type(m.get_submodule(n)) for n in PLAIN] == [nn.Linear] * 3 and "numerics" not in vars(m.head)


def test_where_chooses() -> None:
    m = model()
    assert swap_linear(m, where=["head"]).swapped == ["head"]
    assert swap_linear(m, where=lambda name, layer: layer.out_features == 16).swapped == ["block.0"]
    assert swap_linear(nn.Linear(2, 2)).swapped == [""]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("head", "swap_linear(where: 'head'): must be a list of names; write ['head']"),
        (
            ["had"],
            "swap_linear(where: ['had']): no linear layer 'had'; there are: block.0, block.2, odd, head",
        ),
        (["embed"], "swap_linear(where: ['embed']): no linear layer 'embed'; there are: block.0"),
        (["head", "odd"], "swap_linear(where: ['head', 'odd']): cannot swap odd: it is a Scaled"),
    ],
)
def test_a_name_that_cannot_be_swapped_is_an_error_and_nothing_is(where: list[str], expected: str) -> None:
    m = model()
    with pytest.raises(ContractError) as error:
        swap_linear(m, where=where)
    assert str(error.value).startswith(expected) and type(m.head) is nn.Linear


def test_layers_that_would_not_notice_are_not_swapped_silently() -> None:
    m = nn.Sequential(nn.Linear(2, 2), DetLinear(2, 2))
    m[0].forward = m[0].forward  # what accelerate does
    with pytest.warns(UserWarning, match="left as they are: 0: its forward was replaced on the object"):
        swap = swap_linear(m)
    assert swap.swapped == [] and swap.skipped["1"] == "it is a DetLinear already"


def test_layers_that_are_never_called_are_not_swapped_silently() -> None:
    """In evaluation PyTorch's encoder layer passes its weights to a fused kernel and calls none of its
    layers."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dtype=BF16), 1, enable_nested_tensor=False
    )
    with pytest.warns(UserWarning, match="reads the weight without calling the layer"):
        swap = swap_linear(encoder)
    assert not swap.swapped and {"layers.0.linear1", "layers.0.linear2"} <= set(swap.skipped)


def test_an_undo_does_not_overwrite_what_came_after() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=BF16), nn.Linear(4, 4, dtype=BF16))
    swap = swap_linear(model)
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.raises(ContractError, match=r"Swap.undo: 1 is now a Parametrized\w+; undo that change first"):
        swap.undo()
    assert type(model[0]) is DetLinear
    torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    swap.undo()
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_it_is_called_as_a_linear_layer_is() -> None:
    layer = DetLinear(8, 4, dtype=BF16)
    x = randn(3, 8)
    assert torch.equal(layer(input=x), layer(x))
    assert layer.to("meta")(x.to("meta")).shape == (3, 4)


@pytest.mark.parametrize("thing", [DetLinear, swap_linear, in_forward])
def test_examples_run(thing: object) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, "nn")
    output: list[str] = []
    assert test.examples and doctest.DocTestRunner().run(test, out=output.append).failed == 0, "".join(output)
    assert isobit.nn.DetLinear is DetLinear


# In the place of a forward


def test_a_function_runs_once_in_the_place_of_a_forward() -> None:
    layer, seen = nn.Linear(6, 4), []
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, output: seen.append(output))

    def function(x: Tensor, scale: int) -> Tensor:
        assert "forward" not in vars(layer)  # calls of the layer in here are its own again
        return x * scale

    assert in_forward(layer, function, torch.ones(2), scale=3).tolist() == [6.0, 6.0] == seen[0].tolist()
    assert "forward" not in vars(layer) and layer(torch.zeros(2, 6)).shape == (2, 4)


def test_a_forward_comes_back_after_an_error_too() -> None:
    layer = nn.Linear(6, 4)
    layer.register_forward_pre_hook(lambda module, args: 1 / 0)
    layer.forward = replaced = lambda x: x
    with pytest.raises(ZeroDivisionError):  # before the function is called
        in_forward(layer, lambda x: x, torch.ones(2))
    assert vars(layer)["forward"] is replaced


# A Hugging Face model


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_a_hugging_face_model(tied: bool) -> None:
    """Forward and backward through the swapped head, whose logits do not depend on the batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    m = transformers.LlamaForCausalLM(config).to(BF16)
    ids = torch.randint(0, 97, (3, 10), generator=generator())
    expected = m(ids).logits
    swap = swap_linear(m, where=["lm_head"], numerics="chain16")
    assert (m.lm_head.weight is m.model.embed_tokens.weight) is tied
    seen: list[Tensor] = []
    m.lm_head.register_forward_hook(lambda layer, args, out: seen.append(args[0].detach()))
    out = m(ids, labels=ids)
    torch.testing.assert_close(out.logits, expected, rtol=0.02, atol=0.02)
    out.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in m.parameters())
    with torch.no_grad():
        (hidden,) = seen
        assert torch.equal(m.lm_head(hidden[1, 4]), out.logits[1, 4])
        assert torch.equal(m.lm_head(hidden[2:, 3:7]), out.logits[2:, 3:7])
    swap.undo()
    assert torch.equal(m(ids).logits, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "chain17"}, r"numerics: 'chain17'\): no class of products; known: chain16"),
        ({"numerics": "lse/1"}, r"numerics: 'lse/1'\): no class of products"),
        ({"backend": "cublas"}, r"unknown backend; known: hopper, triton, model"),
    ],
)
def test_unknown_classes_and_backends_are_refused_before_a_forward(
    options: dict[str, str], message: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    with pytest.raises(ContractError, match=message):
        isobit.nn.swap_linear(model, **options)
    assert type(model[0]) is torch.nn.Linear  # untouched
    with pytest.raises(ContractError, match=message):
        isobit.nn.DetLinear(16, 8, **options)
    isobit.nn.DetLinear(16, 8, numerics="chain16/sm_80")  # of another GPU than is here
