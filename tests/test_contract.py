"""Guards the contract: what annotations become, and the exact message for every rule that can be broken."""

# ruff: noqa: F722, F821
# "* V" in an annotation names dimensions, not types.

import copy
import pickle
from collections.abc import Callable
from typing import Any, Optional, Union

import pytest
import torch
from torch import Tensor

from isobit import ContractError, UnsupportedError
from isobit.frame.contract import (
    F32,
    MISSING,
    Contract,
    Float,
    Half,
    Int,
    Like,
    Mask,
    Spec,
    describe,
    dtype_name,
)

META = torch.device("meta")
SCALARS = {"k": 2, "scale": 0.5, "flag": False, "validate": None, "backend": None}


def declared(
    x: Float[Tensor, "* V"],
    ids: Int[Tensor, "*"],
    weight: F32[Tensor, "K V"],
    pair: F32[Tensor, "2 *"],
    mask: Mask[Tensor, "*"] | None,
    k: int,
    scale: float = 1.0,
    flag: bool = False,
    validate: bool | None = None,
    backend: str | None = None,
) -> tuple[
    F32[Tensor, "*"],
    F32[Tensor, "* K if flag"],
    Like[Tensor, "x"],
    F32[Tensor, "2 *"],
]: ...


CONTRACT = Contract("declared", declared)


def tensors(lead: tuple[int, ...] = (3,), V: int = 7, K: int = 4, dtype: torch.dtype = torch.float32) -> dict:
    return {
        "x": torch.zeros(*lead, V, dtype=dtype),
        "ids": torch.zeros(lead, dtype=torch.int64),
        "weight": torch.zeros(K, V),
        "pair": torch.zeros(2, *lead),
        "mask": torch.ones(lead, dtype=torch.bool),
    }


def values(**changes: Any) -> tuple[Any, ...]:
    """Arguments that fulfil the contract, with some replaced."""
    given = tensors() | SCALARS | changes
    return tuple(given[name] for name in CONTRACT.names)


def message(check: Callable[[tuple[Any, ...]], Any], given: tuple[Any, ...]) -> str:
    with pytest.raises(ContractError) as error:
        check(given)
    return str(error.value)


# What annotations become


def test_annotations_become_specs() -> None:
    by_name = {p.name: p for p in CONTRACT.params}
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert by_name["x"].spec == Spec("floating point", floats, ("*", "V"))
    assert by_name["ids"].spec == Spec("int32 or int64", (torch.int32, torch.int64), ("*",))
    assert by_name["weight"].spec == Spec("fp32", (torch.float32, torch.float64), ("K", "V"))
    assert by_name["pair"].spec == Spec("fp32", (torch.float32, torch.float64), ("2", "*"))
    mask = by_name["mask"].spec
    assert mask is not None and torch.bool in mask.dtypes and torch.float32 not in mask.dtypes
    assert [n for n, p in by_name.items() if p.optional] == ["mask", "validate", "backend"]
    assert [by_name[n].scalar for n in ("k", "scale", "flag", "validate", "backend")] == [
        int, float, bool, bool, str,
    ]  # fmt: skip
    assert by_name["scale"].default == 1.0 and by_name["mask"].default is MISSING
    assert CONTRACT.tensor_positions == [0, 1, 2, 3, 4]


def test_only_a_named_last_dimension_must_be_contiguous() -> None:
    contiguous = {p.name: p.spec.contiguous_last for p in CONTRACT.params if p.spec}
    assert contiguous == {"x": True, "ids": False, "weight": True, "pair": False, "mask": False}


def test_outputs_become_specs() -> None:
    plain, optional, like, fixed = CONTRACT.outputs
    assert (plain.dims, plain.when, plain.like) == (("*",), None, None)
    assert (optional.dims, optional.when) == (("*", "K"), "flag")
    assert like.like == "x" and fixed.dims == ("2", "*")


def test_schema_text() -> None:
    assert CONTRACT.schema() == (
        "declared(Tensor x, Tensor ids, Tensor weight, Tensor pair, Tensor? mask, int k, float scale, "
        "bool flag, bool? validate, str? backend) -> (Tensor, Tensor, Tensor, Tensor)"
    )


def test_schema_of_a_single_output_and_of_both_spellings_of_optional() -> None:
    def single(
        a: Optional[Float[Tensor, "N"]],  # noqa: UP045 - the older spelling is what is tested
        b: Union[Int[Tensor, "N"], None],  # noqa: UP007
        c: str,
    ) -> Like[Tensor, "a"]: ...

    assert Contract("single", single).schema() == "single(Tensor? a, Tensor? b, str c) -> Tensor"


def test_torch_library_accepts_the_schema() -> None:
    parsed = torch._C.parse_schema(CONTRACT.schema())
    assert [a.name for a in parsed.arguments] == CONTRACT.names and len(parsed.returns) == 4


# Rules on types


def test_good_values_pass_both_checks() -> None:
    CONTRACT.typed(values())
    dims = CONTRACT.check(values())
    assert {k: (tuple(v[0]) if k == "*" else v[0]) for k, v in dims.items()} == {"*": (3,), "V": 7, "K": 4}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"x": None}, "declared(x: None): is required"),
        ({"k": None}, "declared(k: None): is required"),
        ({"x": [1.0, 2.0]}, "declared(x: [1.0, 2.0]): must be a tensor, not list"),
        ({"mask": 1}, "declared(mask: 1): must be a tensor, not int"),
        ({"k": 1.5}, "declared(k: 1.5): must be int, not float"),
        ({"k": torch.ones(3)}, "declared(k: [3] fp32): must be int, not Tensor"),
        ({"scale": "1"}, "declared(scale: '1'): must be a number, not str"),
        ({"scale": True}, "declared(scale: True): must be a number, not bool"),
        ({"scale": torch.tensor(1.0)}, "declared(scale: [] fp32): must be a number, not Tensor"),
        ({"scale": 1j}, "declared(scale: 1j): must be a number, not complex"),
        ({"flag": 1}, "declared(flag: 1): must be bool, not int"),
        ({"validate": "yes"}, "declared(validate: 'yes'): must be bool, not str"),
        ({"backend": 3}, "declared(backend: 3): must be str, not int"),
    ],
)
def test_wrong_types(change: dict[str, Any], expected: str) -> None:
    assert message(CONTRACT.typed, values(**change)) == expected


def test_valid_types_are_accepted() -> None:
    CONTRACT.typed(values(scale=2, mask=None, validate=True, backend="any"))
    CONTRACT.typed(values(x=torch.nn.Parameter(torch.zeros(3, 7))))


# Rules on tensors


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"x": torch.zeros(3, 7, dtype=torch.int64)},
            "declared(x: [3, 7] int64): dtype must be floating point (bf16, fp16, fp32, fp64)",
        ),
        (
            {"x": torch.zeros(3, 7, dtype=torch.complex64)},
            "declared(x: [3, 7] complex64): dtype must be floating point (bf16, fp16, fp32, fp64)",
        ),
        (
            {"ids": torch.zeros(3)},
            "declared(ids: [3] fp32): dtype must be int32 or int64 (int32, int64)",
        ),
        (
            {"ids": torch.zeros(3, dtype=torch.bool)},
            "declared(ids: [3] bool): dtype must be int32 or int64 (int32, int64)",
        ),
        (
            {"weight": torch.zeros(4, 7, dtype=torch.bfloat16)},
            "declared(weight: [4, 7] bf16): dtype must be fp32 (fp32, fp64)",
        ),
        (
            {"mask": torch.ones(3)},
            "declared(mask: [3] fp32): dtype must be bool or integer "
            "(bool, uint8, int8, int16, int32, int64)",
        ),
        (
            {"ids": torch.zeros(3, dtype=torch.int64, device=META)},
            "declared(ids: [3] int64): is on meta but x is on cpu",
        ),
        (
            {"x": torch.zeros(())},
            "declared(x: [] fp32): needs at least 1 dimension(s) [*, V], has 0",
        ),
        (
            {"weight": torch.zeros(4, 7, 1)},
            "declared(weight: [4, 7, 1] fp32): needs 2 dimension(s) [K, V], has 3",
        ),
        (
            {"weight": torch.zeros(7)},
            "declared(weight: [7] fp32): needs 2 dimension(s) [K, V], has 1",
        ),
        (
            {"ids": torch.zeros(2, dtype=torch.int64)},
            "declared(ids: [2] int64): leading shape=[2] but leading shape=[3] from x",
        ),
        (
            {"ids": torch.zeros(3, 1, dtype=torch.int64)},
            "declared(ids: [3, 1] int64): leading shape=[3, 1] but leading shape=[3] from x",
        ),
        (
            {"mask": torch.ones((), dtype=torch.bool)},
            "declared(mask: [] bool): leading shape=[] but leading shape=[3] from x",
        ),
        ({"weight": torch.zeros(4, 8)}, "declared(weight: [4, 8] fp32): V=8 but V=7 from x"),
        ({"pair": torch.zeros(3, 3)}, "declared(pair: [3, 3] fp32): dimension 0 must be 2, is 3"),
        (
            {"pair": torch.zeros(2, 4)},
            "declared(pair: [2, 4] fp32): leading shape=[4] but leading shape=[3] from x",
        ),
        (
            {"pair": torch.zeros(())},
            "declared(pair: [] fp32): needs at least 1 dimension(s) [2, *], has 0",
        ),
        (
            {"x": torch.zeros(7, 3).T},
            "declared(x: [3, 7] fp32): last dimension must be contiguous, its stride is 3; "
            "call .contiguous() on it",
        ),
        (
            {"x": torch.zeros(3, 1).expand(3, 7)},
            "declared(x: [3, 7] fp32): last dimension must be contiguous, its stride is 0; "
            "call .contiguous() on it",
        ),
    ],
)
def test_wrong_tensors(change: dict[str, Any], expected: str) -> None:
    assert message(CONTRACT.check, values(**change)) == expected


def test_the_first_broken_rule_in_the_order_of_the_signature_is_reported() -> None:
    given = values(ids=torch.zeros(2, dtype=torch.int64), weight=torch.zeros(4, 9))
    assert message(CONTRACT.check, given).startswith("declared(ids:")


def test_strides_that_are_free() -> None:
    wide = torch.zeros(6, 9)
    CONTRACT.check(values(x=wide[::2, 1:8]))
    CONTRACT.check(values(x=torch.zeros(7).expand(3, 7), ids=torch.zeros(1, dtype=torch.int32).expand(3)))
    CONTRACT.check(values(pair=torch.zeros(3, 2).T, mask=torch.ones(6, dtype=torch.uint8)[::2]))
    # One column has no stride to speak of.
    CONTRACT.check(values(x=torch.zeros(5, 3).T[:, :1], weight=torch.zeros(4, 1)))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (5,), (2, 3), (2, 0, 4), (2, 3, 4, 5)])
def test_star_is_any_leading_shape(lead: tuple[int, ...]) -> None:
    dims = CONTRACT.check(values(**tensors(lead)))
    assert tuple(dims["*"][0]) == lead and dims["V"] == (7, "x")


def test_a_missing_optional_tensor_binds_nothing() -> None:
    assert "*" in CONTRACT.check(values(mask=None))


def test_fixed_and_named_dimensions_around_a_star() -> None:
    def around(
        a: Float[Tensor, "N * 3"], b: Float[Tensor, "* N"], c: Float[Tensor, "* 4"]
    ) -> Float[Tensor, "*"]: ...

    contract = Contract("around", around)
    a, b, c = torch.zeros(5, 2, 9, 3), torch.zeros(2, 9, 5), torch.zeros(2, 9, 4)
    dims = contract.check((a, b, c))
    assert dims["N"] == (5, "a") and tuple(dims["*"][0]) == (2, 9)
    for given, expected in (
        ((torch.zeros(5, 2, 9, 4), b, c), "around(a: [5, 2, 9, 4] fp32): dimension 3 must be 3, is 4"),
        ((a, torch.zeros(2, 9, 6), c), "around(b: [2, 9, 6] fp32): N=6 but N=5 from a"),
        ((a, b, torch.zeros(2, 9, 5)), "around(c: [2, 9, 5] fp32): dimension 2 must be 4, is 5"),
    ):
        assert message(contract.check, given) == expected


def test_a_number_as_last_dimension_does_not_clash_with_the_same_number_elsewhere() -> None:
    def twice(a: Float[Tensor, "* 4"], b: Float[Tensor, "* 4"]) -> Float[Tensor, "*"]: ...

    contract = Contract("twice", twice)
    contract.check((torch.zeros(2, 4), torch.zeros(2, 4)))
    given = (torch.zeros(2, 5), torch.zeros(2, 5))
    assert message(contract.check, given) == "twice(a: [2, 5] fp32): dimension 1 must be 4, is 5"


# Outputs


def outputs(**changes: Any) -> list[Tensor]:
    given = values(**changes)
    return CONTRACT.empty_outputs(given, CONTRACT.check(given))


def test_outputs_have_the_promised_shapes_and_dtypes() -> None:
    x = torch.zeros(2, 3, 7, dtype=torch.bfloat16)
    made = outputs(**tensors((2, 3), dtype=torch.bfloat16) | {"x": x}, flag=True)
    assert [(list(o.shape), o.dtype) for o in made] == [
        ([2, 3], torch.float32),
        ([2, 3, 4], torch.float32),
        ([2, 3, 7], torch.bfloat16),
        ([2, 2, 3], torch.float32),
    ]


def test_an_output_that_is_not_asked_for_is_empty() -> None:
    assert [list(o.shape) for o in outputs(flag=False)] == [[3], [0], [3, 7], [2, 3]]


def test_outputs_of_fp64_are_fp64_and_live_where_the_first_tensor_does() -> None:
    given = {k: v.to(META) for k, v in tensors(dtype=torch.float64).items()}
    made = outputs(**given)
    assert {o.dtype for o in made} == {torch.float64} and {o.device.type for o in made} == {"meta"}


# Any strides, and a dtype that an argument decides


def product(
    a: Half[Tensor, "* M K; any strides"],
    b: Half[Tensor, "* K N; any strides"],
    out_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "* M N in out_dtype or a"], Float[Tensor, "M in b"]]: ...


PRODUCT = Contract("product", product)
HALF = torch.zeros(2, 3, dtype=torch.float16)


def test_annotations_of_strides_and_dtypes_become_specs() -> None:
    a, b = (p.spec for p in PRODUCT.params if p.spec)
    assert a == Spec(
        "16-bit floating point", (torch.bfloat16, torch.float16), ("*", "M", "K"), any_strides=True
    )
    assert not a.contiguous_last and b is not None and b.any_strides
    assert [o.dtype_of for o in PRODUCT.outputs] == [("out_dtype", "a"), ("b",)]
    assert PRODUCT.outputs[0].dims == ("*", "M", "N") and PRODUCT.params[2].scalar is torch.dtype
    with pytest.raises(TypeError, match="only 'any strides' or 'written' may follow"):
        Half[Tensor, "* K; some strides"]


def test_strides_that_are_declared_free() -> None:
    for b in (HALF.t(), HALF.t()[:, :1].expand(3, 5), HALF.t()[:, ::2]):
        assert PRODUCT.check((HALF, b, None))["K"] == (3, "a")


def test_a_dtype_is_a_scalar_of_the_schema() -> None:
    assert PRODUCT.schema() == "product(Tensor a, Tensor b, ScalarType? out_dtype) -> (Tensor, Tensor)"
    assert len(torch._C.parse_schema(PRODUCT.schema()).arguments) == 3
    PRODUCT.typed((HALF, HALF.t(), torch.float32))
    assert message(PRODUCT.typed, (HALF, HALF.t(), "fp32")) == (
        "product(out_dtype: 'fp32'): must be dtype, not str"
    )


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_an_output_takes_its_dtype_from_the_first_that_is_given(out_dtype: torch.dtype | None) -> None:
    given = (HALF, HALF.t(), out_dtype)
    first, second = PRODUCT.empty_outputs(given, PRODUCT.check(given))
    assert first.dtype == (out_dtype or torch.float16) and list(first.shape) == [2, 2]
    assert second.dtype == torch.float16


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (HALF.float(), HALF.t(), "(a: [2, 3] fp32): dtype must be 16-bit floating point (bf16, fp16)"),
        (HALF[0], HALF.t(), "(a: [3] fp16): needs at least 2 dimension(s) [*, M, K], has 1"),
        (HALF, HALF, "(b: [2, 3] fp16): K=2 but K=3 from a"),
        (HALF[None], HALF.t(), "(b: [3, 2] fp16): leading shape=[] but leading shape=[1] from a"),
    ],
)
def test_wrong_matrices(a: Tensor, b: Tensor, expected: str) -> None:
    assert message(PRODUCT.check, (a, b, None)) == "product" + expected


# Errors and names


def test_errors_are_value_errors_and_survive_copying() -> None:
    assert issubclass(ContractError, ValueError) and issubclass(UnsupportedError, ContractError)
    error = CONTRACT.error("x", torch.zeros(2, 3), "broken")
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is ContractError and str(twin) == "declared(x: [2, 3] fp32): broken"


def test_descriptions() -> None:
    assert describe(torch.zeros(2, 0, 3, dtype=torch.float16)) == "[2, 0, 3] fp16"
    assert describe(torch.tensor(1, dtype=torch.uint8)) == "[] uint8"
    assert describe("text") == "'text'" and describe(None) == "None"
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_a_message_does_not_print_a_whole_batch() -> None:
    assert len(message(CONTRACT.typed, values(ids=list(range(100_000))))) < 300


# What an op writes into, and what may be anything


def adds(x: Float[Tensor, "N D"], total: F32[Tensor, "D; written"] | None) -> F32[Tensor, "D"]: ...


def takes(x: Float[Tensor, "N D"], how: object | None = None) -> F32[Tensor, "D"]: ...


def test_what_an_op_writes_into_is_in_its_schema() -> None:
    assert Contract("adds", adds).schema() == "adds(Tensor x, Tensor(total!)? total) -> Tensor"


def test_what_is_written_into_is_contiguous() -> None:
    contract, x = Contract("adds", adds), torch.zeros(3, 4)
    assert contract.check((x, torch.zeros(4)))["D"][0] == 4
    rule = r"adds\(total: \[4\] fp32\): is written into and must be contiguous, its strides are \(2,\)"
    with pytest.raises(ContractError, match=rule):
        contract.check((x, torch.zeros(8)[::2]))


@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": 1}, torch.zeros(2), print])
def test_an_object_may_be_anything(value: Any) -> None:
    assert Contract("takes", takes).typed((torch.zeros(3, 4), value))[1] is value
