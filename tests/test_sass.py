"""Guards the reader of machine code: it finds uniform registers that nothing has written, in code of any form
and in a kernel that ptxas 12.8 compiles wrongly, and nothing else."""

import pytest
import torch

from isobit.check.cell import FAIL, OK
from isobit.check.request import Request
from isobit.check.runner import run
from isobit.check.sass import FAULTY_TARGET, faulty, unset_registers
from isobit.ops.delta_rule import kernels_triton


def code(*lines: str) -> str:
    """As nvdisasm prints it: labels stand alone, instructions have addresses."""
    found = [".text.some_kernel:"]
    for i, line in enumerate(lines):
        found.append(line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;")
    return "\n".join(found)


PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR36].tnspA.tnspB, R24"


def test_a_register_without_a_write_is_found_where_it_is_read() -> None:
    (one,) = unset_registers(code("UMOV UR4, 0x400", "UIADD3 UR38, UP0, UR38, 0x40, URZ", "EXIT"))
    assert one == (
        "some_kernel reads UR38 at 0x0010, which is not set there: UIADD3 UR38, UP0, UR38, 0x40, URZ"
    )


@pytest.mark.parametrize(
    "writes",
    [
        ("UMOV UR36, 1", "UMOV UR37, 1", "UMOV UR38, 1", "UMOV UR39, 1"),
        ("ULDC.64 UR36, c[0x0][0x208]", "UIADD3.64 UR38, UR36, 0x80, URZ"),
        ("R2UR UR36, R4", "S2UR UR37, SR_CTAID.X", "UIMAD.WIDE UR38, UR36, UR37, URZ"),
        ("ULOP3.LUT UP0, UR36, URZ, 0x1, URZ, 0xc0, !UPT", "UMOV UR37, UR36", "ULDC.64 UR38, c[0x0][0x208]"),
    ],
)
def test_all_four_registers_of_two_matrices_must_be_written(writes: tuple[str, ...]) -> None:
    assert unset_registers(code(*writes, PRODUCT, "EXIT")) == []
    for left_out in range(len(writes)):
        some = [line for i, line in enumerate(writes) if i != left_out]
        assert unset_registers(code(*some, PRODUCT, "EXIT"))


def test_a_left_operand_in_registers_leaves_two() -> None:
    one = "HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24"
    assert unset_registers(code("ULDC.64 UR10, c[0x0][0x208]", one, "EXIT")) == []
    assert unset_registers(code("ULDC.64 UR8, c[0x0][0x208]", one, "EXIT"))


def test_comparisons_write_no_register() -> None:
    assert unset_registers(code("UISETP.GE.AND UP0, UPT, UR4, UR5, UPT", "EXIT"))


def test_a_write_counts_if_it_is_on_every_path() -> None:
    around = ("@P0 BRA `(.L_x_1)", "UMOV UR4, 0x1", ".L_x_1:", "UMOV UR5, UR4", "EXIT")
    assert unset_registers(code(*around))  # on one of the two
    assert unset_registers(code("UMOV UR4, 0x2", *around)) == []
    behind = ("UMOV UR5, UR4", "EXIT", ".L_x_1:", "UMOV UR4, 0x1", "EXIT")
    assert unset_registers(code(*behind))
    last = (".L_x_2:", "UMOV UR4, 0x1", "BRA `(.L_x_1)")
    before = ("BRA `(.L_x_2)", ".L_x_1:", "UMOV UR5, UR4", "EXIT", *last)
    assert unset_registers(code(*before)) == []  # further down in the file, but earlier
    loop = (".L_x_0:", "UIADD3 UR4, UR4, 0x1, URZ", "@P0 BRA `(.L_x_0)", "EXIT")
    assert unset_registers(code(*loop))  # in the first iteration
    assert unset_registers(code("UMOV UR4, URZ", *loop)) == []


#: A left operand in registers: the descriptor is UR10 and UR11.
HALF = "HGMMA.64x8x16.F32 R24, R4, gdesc[UR8], R24"
MADE = ("UIADD3 UR10, UP0, UR16, 0x80, URZ", "UMOV UR11, UR17")


def test_an_address_is_made_of_what_is_set_whatever_the_predicates_are() -> None:
    """As ptxas left it in a product: UR16 and UR17 are set under a predicate, for a barrier."""
    barrier = ("@!UP5 UMOV UR16, 0x1", "@!UP5 UMOV UR17, 0x1")
    (first, second) = unset_registers(code(*barrier, *MADE, HALF, "EXIT"))
    assert "reads UR10 at" in first and "reads UR11 at" in second and "HGMMA" in first
    whole = ("UMOV UR16, 0x1", "UMOV UR17, 0x1")
    assert unset_registers(code(*whole, *MADE, HALF, "EXIT")) == []
    assert unset_registers(code(*whole, *barrier, *MADE, HALF, "EXIT")) == []  # one or the other
    assert unset_registers(code(*barrier, "MOV R2, UR16", "EXIT")) == []  # not an address
    other = ("@UP5 UMOV UR16, 0x2", "@UP5 UMOV UR17, 0x2")
    assert unset_registers(code(*barrier, *other, *MADE, HALF, "EXIT")) == []  # both cases are covered


def test_a_predicate_counts_until_it_is_decided_again() -> None:
    some = ("@P0 UMOV UR16, 0x1", "@P0 UMOV UR17, 0x1")
    skip = ("@!P0 BRA `(.L_x_1)", *MADE, HALF, ".L_x_1:", "EXIT")
    assert unset_registers(code(*some, *skip)) == []  # where P0 does not hold there is no product
    again = "ISETP.GE.AND P0, PT, R2, R3, PT"
    assert unset_registers(code(*some, again, *skip))
    assert unset_registers(code(*some, "@P0 BRA `(.L_x_1)", *skip[1:]))
    uniform = ("@UP0 UMOV UR16, 0x1", "@UP0 UMOV UR17, 0x1", "BRA.U !UP0, `(.L_x_1)", "UMOV UR10, UR16")
    assert unset_registers(code(*uniform, "UMOV UR11, UR17", HALF, ".L_x_1:", "EXIT")) == []


def test_a_copy_of_a_predicate_stands_for_it() -> None:
    copy, writes = (
        "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
        [f"@UP0 UMOV UR{r}, 0x1" for r in range(36, 40)],
    )
    others = [f"UMOV UR{r}, 0x2" for r in range(36, 40)]
    after = (*others, ".L_x_1:", PRODUCT, "EXIT")
    assert unset_registers(code(copy, *writes, "@P0 BRA `(.L_x_1)", *after)) == []
    assert unset_registers(code(copy.replace("UP0", "!UP0"), *writes, "@!P0 BRA `(.L_x_1)", *after)) == []
    for wrong in (
        (copy, *writes, "@!P0 BRA `(.L_x_1)"),
        (copy.replace("UP0", "UP1"), *writes, "@P0 BRA `(.L_x_1)"),
        (copy.replace("0x80", "0xa8"), *writes, "@P0 BRA `(.L_x_1)"),  # or
        (f"@P1 {copy}", *writes, "@P0 BRA `(.L_x_1)"),
        (copy, *writes, "ISETP.GE.AND P0, PT, R4, R5, PT", "@P0 BRA `(.L_x_1)"),
        (copy, "UISETP.GE.AND UP0, UPT, UR4, 0x1, UPT", *writes, "@P0 BRA `(.L_x_1)"),
    ):
        assert any("HGMMA" in line for line in unset_registers(code(*wrong, *after))), wrong


def test_doubt_goes_through_a_loop() -> None:
    loop = (".L_x_0:", HALF, "UIADD3 UR10, UP1, UR10, 0x2, URZ", "@P0 BRA `(.L_x_0)", "EXIT")
    assert unset_registers(code("UMOV UR10, 0x1", "UMOV UR11, 0x1", *loop)) == []
    assert unset_registers(code("@P1 UMOV UR10, 0x1", "UMOV UR11, 0x1", *loop))


def test_tables_of_branches_and_calls_are_understood() -> None:
    table = 'BRX R2 -0x1b0 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    both = (".L_x_1:", "UMOV UR5, UR4", "EXIT", ".L_x_2:", "UMOV UR6, UR4", "EXIT")
    assert unset_registers(code("UMOV UR4, 0x1", table, *both)) == []
    assert unset_registers(code(table, "UMOV UR4, 0x1", *both))
    call = "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)"
    assert unset_registers(code(call, "MOV R2, UR36", "EXIT")) == []  # it returns its result there


def test_functions_are_read_apart() -> None:
    first = code("UMOV UR4, 0x1", "EXIT")
    second = code("UMOV UR5, UR4", "EXIT").replace("some_kernel", "other_kernel")
    assert [line.split()[0] for line in unset_registers(f"{first}\n{second}")] == ["other_kernel"]


def test_the_law_compile_rejects_a_kernel_that_ptxas_compiles_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request(
        ops=("chunk_gated_delta_rule_bwd_dhu",), backends=("triton",), laws=("compile",),
        dtypes=(torch.bfloat16,), targets=(FAULTY_TARGET,),
    )  # fmt: skip
    # As they are, all of these kernels pass: `make compat`.
    monkeypatch.setattr(kernels_triton, "columns_of", lambda rows: 32)
    lost = faulty()
    (cell,) = run(request)
    assert cell.status == (FAIL if lost else OK)
    assert not lost or "which is not set there" in str(cell)
