"""Batches of tokens: every one has another number, and all of their calls are one family."""

from isobit.frame.contract import Contract
from isobit.frame.family import Varying, leading


def tokens_and_rows(contract: Contract) -> Varying:
    """Tokens, and the rows of their experts. Rules and backends read the number of neither; launchers ask
    whether there is a row for every expert of every token."""
    return leading(contract, "T", "R")
