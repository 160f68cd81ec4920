"""Shapes and dtypes as annotations, and errors that name the violated rule.

    def logp(logits: Float[Tensor, "* V"], token_ids: Int[Tensor, "*"], ...) -> Tensor

means: `logits` is floating point, with any leading shape `*`, then V contiguous columns; `token_ids` is int32
or int64 with the same leading shape. A dimension that appears twice must have one size. After the
dimensions may follow

    "* M K; any strides"            the last dimension need not be contiguous
    "V D; written"                  the op writes into it, and it is contiguous
    "* if return_entropy"           an output that exists only if this argument is true, or given
    "* M N in out_dtype or a"       an output in the dtype of the first of these arguments that is not None

and `float | F32[Tensor, "*"]` is a number, or one for every row. `Literal["a", "b"]` is a string. Of
`Sequence[int] | Int[Tensor, "N"]` the contract takes the tensor: the public function makes it of the list.
Any other type may be anything. Arguments are bound by name.

The checks and their messages, the `torch.library` schema and the fake outputs all derive from these
annotations, so they cannot disagree with the signature.
"""

import inspect
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor

BF16, F16, F32_, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INTS = (torch.int32, torch.int64)

#: Short names of dtypes, used in messages, cases, results and on the command line.
DTYPE_NAMES = {
    BF16: "bf16",
    F16: "fp16",
    F32_: "fp32",
    F64: "fp64",
    torch.bool: "bool",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}


class ContractError(ValueError):
    """An argument violates the contract of an op. Raised before anything is launched."""


@dataclass(frozen=True)
class Spec:
    """Requirements on one tensor: a kind (the allowed dtypes) and named dimensions."""

    kind: str
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[str, ...]
    like: str | None = None  # an output with the shape and dtype of this argument
    when: str | None = None  # an output that is empty, [0], unless this argument is true, or a tensor
    dtype_of: tuple[str, ...] = ()  # an output in the dtype of the first of these that is not None
    any_strides: bool = False
    written: bool = False  # the op writes into it

    @property
    def contiguous_last(self) -> bool:
        """A tensor with a named last dimension is read along it, so that dimension must be contiguous, unless
        the tensor is declared with any strides."""
        return bool(self.dims) and self.dims[-1] != "*" and not self.any_strides


class _Annotation:
    """`Float[Tensor, "* V"]` is `Annotated[Tensor, Spec(...)]`, built at run time."""

    def __init__(self, kind: str, *dtypes: torch.dtype):
        self.kind, self.dtypes = kind, dtypes

    def __getitem__(self, item: tuple[type, str]) -> Any:
        base, text = item
        if self.kind == "Like":
            return Annotated[base, Spec(self.kind, (), (), like=text)]
        text, _, when = text.partition(" if ")
        text, _, source = text.partition(" in ")
        dims, _, more = text.partition("; ")
        if more not in ("", "any strides", "written"):
            rule = "only 'any strides' or 'written' may follow the dimensions"
            raise TypeError(f"{more!r} in an annotation: {rule}")
        return Annotated[base, Spec(
            self.kind, self.dtypes, tuple(dims.split()), when=when or None,
            dtype_of=tuple(source.split(" or ")) if source else (), any_strides=more == "any strides",
            written=more == "written",
        )]  # fmt: skip


if TYPE_CHECKING:  # a type checker sees plain tensors with an annotation
    from typing import Annotated as F32
    from typing import Annotated as Float
    from typing import Annotated as Half
    from typing import Annotated as Int
    from typing import Annotated as Like
    from typing import Annotated as Mask
    from typing import Annotated as Number
    from typing import Annotated as Single
else:
    Float = _Annotation("floating point", BF16, F16, F32_, F64)
    Single = _Annotation("floating point up to fp32", BF16, F16, F32_)
    Half = _Annotation("16-bit floating point", BF16, F16)
    F32 = _Annotation("fp32", F32_, F64)  # fp64 only for fp64 inputs, on the reference
    Int = _Annotation("int32 or int64", *INTS)
    Mask = _Annotation(
        "bool or integer", torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
    )
    Number = _Annotation("a number", BF16, F16, F32_, F64, *INTS)
    Like = _Annotation("Like")

_SCALARS = {int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}

_PLAIN = (Tensor, torch.nn.Parameter)
_LEAST, _MOST = -(2**63), 2**63 - 1

#: The default of an argument without one.
MISSING: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Param:
    """One parameter of an op: a tensor with a spec, a scalar with a Python type, or either of the two."""

    name: str
    spec: Spec | None
    scalar: type | None
    optional: bool
    default: Any

    @property
    def schema(self) -> list[str]:
        """Its parameters in the `torch.library` op. "A tensor or a number" becomes two, one of which is
        None."""
        either = self.spec is not None and self.scalar is not None
        mark = "?" if self.optional or either else ""
        kind = f"Tensor({self.name}!)" if self.spec and self.spec.written else "Tensor"
        tensor = [f"{kind}{mark} {self.name}{'_of_rows' if either else ''}"] if self.spec else []
        return tensor + ([f"{_SCALARS[self.scalar]}{mark} {self.name}"] if self.scalar else [])


def _kinds_of(hint: Any) -> tuple[Spec | None, type | None, bool]:
    """(spec, scalar, optional) of an annotation."""
    hints = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    optional = type(None) in hints
    specs = [spec for h in hints if (spec := _spec_of(h)) is not None]
    others = [h for h in hints if _spec_of(h) is None and h is not type(None)]
    scalars = [type(get_args(h)[0]) if get_origin(h) is Literal else h for h in others]
    scalars = [h for h in scalars if h in _SCALARS] or ([object] if others and not specs else [])
    return specs[0] if specs else None, scalars[0] if scalars else None, optional


def _spec_of(hint: Any) -> Spec | None:
    return hint.__metadata__[0] if get_origin(hint) is Annotated else None


def _as_scalar(value: Any, scalar: type) -> Any:
    """The value as this type, or an error: bool is not a number, numpy's and symbolic numbers are."""
    if type(value) is scalar or scalar is object:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if type(value) is scalar or (scalar is float and isinstance(value, torch.SymInt | torch.SymFloat)):
        return value
    if isinstance(value, bool) or scalar in (bool, str, torch.dtype):
        raise TypeError(scalar)
    if scalar is int and isinstance(value, int | torch.SymInt):
        return value
    if scalar is float and isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    raise TypeError(scalar)


def is_dtensor(t: Any) -> bool:
    """torch.distributed.tensor is not imported for this."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(t, distributed.DTensor)


def _why_not_plain(t: Tensor) -> str | None:
    """Why a special tensor (DTensor, nested, ...) is not supported, and what to do about it."""
    if t.is_nested:
        return "must be a dense tensor, it is nested; pass the packed rows (.values()) or a padded tensor"
    if is_dtensor(t):
        return (
            "is a DTensor; pass its local part (.to_local()) or the whole of it (.full_tensor()), or, for a "
            "parameter that FSDP2 has sharded, call this through isobit.nn.in_forward"
        )
    return None


def _rows_at(spec: Spec | None) -> tuple[int, int] | None:
    if spec is None or "*" not in spec.dims:
        return None
    before = spec.dims.index("*")
    return before, len(spec.dims) - before - 1


def is_given(value: Any) -> bool:
    """The condition under which an output exists."""
    return isinstance(value, Tensor) or bool(value)


def describe(value: Any) -> str:
    """`[3, 7] bf16` for a tensor, the value itself (cut short) for anything else."""
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else f"[{', '.join(map(str, value.shape))}]"
        return f"{shape} {dtype_name(value.dtype)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def params_of(fn: Any) -> list[Param]:
    """The parameters of a function with such annotations."""
    params = []
    for p in inspect.signature(fn).parameters.values():
        if p.annotation is p.empty:
            raise TypeError(f"{fn.__name__}({p.name}): needs an annotation")
        params.append(Param(p.name, *_kinds_of(p.annotation), MISSING if p.default is p.empty else p.default))
    return params


def outputs_of(fn: Any) -> list[Spec]:
    """The outputs that a function declares by its return annotation."""
    returns = inspect.signature(fn).return_annotation
    hints = get_args(returns) if get_origin(returns) is tuple else (returns,)
    outputs = [spec for spec in map(_spec_of, hints) if spec is not None]
    if len(outputs) != len(hints):
        raise TypeError(f"{fn.__name__}: every output needs an annotation like F32[Tensor, '*']")
    return outputs


class Contract:
    """The contract of one op: its parameters and its outputs. `fn` declares both, unless `params` are
    given."""

    def __init__(self, name: str, fn: Any, controls: Sequence[Param] = (), params: Any = None) -> None:
        self.name, self.outputs = name, outputs_of(fn)
        self.params: list[Param] = [*(params_of(fn) if params is None else params), *controls]
        self.names = [p.name for p in self.params]
        self.tensor_positions = [i for i, p in enumerate(self.params) if p.spec]
        self._defaults = {p.name: p.default for p in self.params}
        #: For each parameter: how many dimensions come before and after those that are rows.
        self.rows_at = [_rows_at(p.spec) for p in self.params]
        self._either = [i for i, p in enumerate(self.params) if p.spec and p.scalar]
        self._tensors = [
            (i, p.name, p.spec, p.spec.contiguous_last) for i, p in enumerate(self.params) if p.spec
        ]

    def schema(self) -> str:
        returns = ", ".join("Tensor" for _ in self.outputs)
        result = f"({returns})" if len(self.outputs) > 1 else returns
        return f"{self.name}({', '.join(s for p in self.params for s in p.schema)}) -> {result}"

    def to_torch(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values in the form of the `torch.library` op."""
        if not self._either:
            return values
        given: list[Any] = []
        for i, v in enumerate(values):
            if i in self._either:
                given += [v, None] if isinstance(v, Tensor) else [None, v]
            else:
                given.append(v)
        return tuple(given)

    def from_torch(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._either:
            return values
        given, own = iter(values), []
        for i in range(len(self.params)):
            v = next(given)
            if i in self._either:
                number = next(given)
                v = number if v is None else v
            own.append(v)
        return tuple(own)

    def in_order(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """The values of a call in the order of the signature, of any type."""
        all_ = {**self._defaults, **given}
        if len(all_) > len(self._defaults):
            unknown = ", ".join(sorted(given.keys() - self._defaults.keys()))
            raise ContractError(f"{self.name}: unknown argument(s): {unknown}")
        return tuple(all_.values())  # given values replace defaults in place

    def error(self, arg: str, value: Any, rule: str) -> ContractError:
        return ContractError(f"{self.name}({arg}: {describe(value)}): {rule}")

    def typed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Checks that tensors and numbers are where they belong; the dispatcher would report this in terms of
        its internals. Numbers of other libraries become Python's."""
        changed: dict[int, Any] = {}
        i = -1
        for p, v in zip(self.params, values, strict=True):  # this is hot, so the usual cases come first
            i += 1
            if v is None:
                if not p.optional:
                    raise self.error(p.name, None, "is required")
            elif type(v) is p.scalar and not (type(v) is int and not _LEAST <= v <= _MOST):
                continue
            elif p.spec is None or type(v) not in _PLAIN or v.is_nested:
                changed[i] = self._converted(p, v)
        if not changed:
            return values
        return tuple(changed.get(i, v) for i, v in enumerate(values))

    def _converted(self, p: Param, value: Any) -> Any:
        """An argument of an unusual type, converted; or an error."""
        if value is MISSING:
            raise self.error(p.name, None, "is required")
        if p.spec is not None and isinstance(value, Tensor):
            rule = _why_not_plain(value)
            if rule is not None:
                raise self.error(p.name, value, rule)
            return value
        if p.scalar is None:
            advice = "; torch.from_numpy makes one of it" if type(value).__name__ == "ndarray" else ""
            raise self.error(p.name, value, f"must be a tensor, not {type(value).__name__}{advice}")
        try:
            number = _as_scalar(value, p.scalar)
        except TypeError:
            rule = "a number" if p.scalar is float else p.scalar.__name__
            rule += " or a tensor" if p.spec is not None else ""
            raise self.error(p.name, value, f"must be {rule}, not {type(value).__name__}") from None
        if isinstance(number, int) and not _LEAST <= number <= _MOST:
            raise self.error(p.name, value, "must be a number that 64 bits can hold")
        return number

    def check(self, values: Sequence[Any]) -> dict[str, Any]:
        """Bind every named dimension, or raise an error for the first violated rule. Returns the
        dimensions."""
        dims: dict[str, Any] = {}
        first_device: torch.device | None = None
        for i, name, spec, contiguous_last in self._tensors:
            t = values[i]
            if not isinstance(t, Tensor):  # None, or a number in its place
                continue
            if t.layout is not torch.strided:
                raise self.error(name, t, f"must be a dense tensor, its layout is {t.layout}")
            if t.dtype not in spec.dtypes:
                raise self.error(name, t, f"dtype must be {self._dtype_rule(spec)}")
            if first_device is None:
                first_device, first_name = t.device, name
            elif t.device != first_device:
                raise self.error(name, t, f"is on {t.device} but {first_name} is on {first_device}")
            if spec.dims == ("*",):  # the two common forms, without the general case below: this is hot
                self._agree(name, t, "*", t.shape, dims)
            elif len(spec.dims) == 2 and spec.dims[0] == "*" and t.ndim and not spec.dims[1].isdigit():
                self._agree(name, t, "*", t.shape[:-1], dims)
                self._agree(name, t, spec.dims[1], t.shape[-1], dims)
            else:
                self._bind(name, t, spec.dims, dims)
            if spec.written and not t.is_contiguous():
                raise self.error(
                    name, t, f"is written into and must be contiguous, its strides are {t.stride()}"
                )
            if contiguous_last and t.shape[-1] > 1 and t.stride(-1) != 1:
                rule = f"last dimension must be contiguous, its stride is {t.stride(-1)}"
                raise self.error(name, t, f"{rule}; call .contiguous() on it")
        return dims

    @staticmethod
    def _dtype_rule(spec: Spec) -> str:
        names = [dtype_name(d) for d in spec.dtypes]
        return f"{spec.kind} ({', '.join(names)})"

    def _bind(self, name: str, t: Tensor, wanted: tuple[str, ...], dims: dict[str, Any]) -> None:
        shape = t.shape
        star = wanted.index("*") if "*" in wanted else None
        named = len(wanted) - (star is not None)
        if len(shape) < named or (star is None and len(shape) != named):
            least = "at least " if star is not None else ""
            rule = f"needs {least}{named} dimension(s) [{', '.join(wanted)}], has {len(shape)}"
            raise self.error(name, t, rule)
        after = 0 if star is None else len(wanted) - star - 1
        for k, dim in enumerate(wanted):
            if dim == "*":
                size: Any = shape[k : len(shape) - after]
            else:
                size = shape[k if star is None or k < star else k - len(wanted)]
            if dim.isdigit():
                if size != int(dim):
                    at = k if star is None or k < star else len(shape) - len(wanted) + k
                    raise self.error(name, t, f"dimension {at} must be {dim}, is {size}")
                continue
            self._agree(name, t, dim, size, dims)

    def _agree(self, name: str, t: Tensor, dim: str, size: Any, dims: dict[str, Any]) -> None:
        """A dimension has one size everywhere: that of its first occurrence."""
        known = dims.setdefault(dim, (size, name))
        if known[0] != size:
            what = "leading shape" if dim == "*" else dim
            got, want = (list(x) if dim == "*" else x for x in (size, known[0]))
            raise self.error(name, t, f"{what}={got} but {what}={want} from {known[1]}")

    def output_dtype(self, spec: Spec, values: tuple[Any, ...]) -> torch.dtype:
        """fp32 becomes fp64 if the first tensor is fp64: the reference keeps full precision then."""
        if spec.like is not None:
            return values[self.names.index(spec.like)].dtype
        if spec.dtype_of:
            given = (values[self.names.index(name)] for name in spec.dtype_of)
            source = next(v for v in given if v is not None)
            return source if isinstance(source, torch.dtype) else source.dtype
        dtype = F64 if values[self._tensors[0][0]].dtype == F64 else F32_
        return spec.dtypes[0] if spec.dtypes and dtype not in spec.dtypes else dtype

    def empty_outputs(self, values: tuple[Any, ...], dims: dict[str, Any]) -> list[Tensor]:
        """Outputs with the promised shapes and dtypes, uninitialised; those not requested are empty."""
        outs = []
        for spec in self.outputs:
            if spec.like is not None:
                shape = list(values[self.names.index(spec.like)].shape)
            elif spec.when is not None and not is_given(values[self.names.index(spec.when)]):
                shape = [0]
            else:
                shape = []
                for d in spec.dims:
                    shape += list(dims[d][0]) if d == "*" else [int(d) if d.isdigit() else dims[d][0]]
            device = values[self._tensors[0][0]].device
            outs.append(torch.empty(shape, dtype=self.output_dtype(spec, values), device=device))
        return outs
