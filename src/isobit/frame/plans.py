"""The call plans of an op, by cache key and by family."""

from typing import TYPE_CHECKING, Any

from isobit.frame.cache_key import CacheKey, Sizes, remember, split_key
from isobit.frame.call_plan import CallPlan
from isobit.frame.contract import Contract

if TYPE_CHECKING:
    from isobit.frame.family import Varying


class Plans(dict[CacheKey, CallPlan]):
    """By cache key; `families` has the first plan of each family. What varies in a family is the number of
    rows, unless a plan that launches kernels has set it."""

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        self.families: dict[CacheKey, CallPlan] = {}
        self.alike: dict[Any, CallPlan] = {}  # by what callers say of calls (`Op.__call__`)
        self.into: dict[CacheKey, CallPlan] = {}  # by keys with the memory of a result (`isobit.frame.into`)
        self.varying: Varying | None = None
        self._contract = contract

    def _split(self, key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        return split_key(key, self._contract.rows_at) if self.varying is None else self.varying.split(key)

    def find(self, key: CacheKey) -> CallPlan | None:
        """The plan of calls with this key, or one made from its family's."""
        plan = self.get(key)
        if plan is None and (split := self._split(key)) is not None:
            first = self.families.get(split[0])
            if first is not None:
                plan = first.for_other_sizes(split[1])
                remember(self, key, plan)
        return plan

    def keep(self, key: CacheKey | None, plan: CallPlan) -> bool:
        """Cache a plan for calls with this key, and for its family; whether it has one."""
        remember(self, key, plan)
        split = None if key is None else self._split(key)
        if split is None:
            return False
        if self.varying is not None:
            plan.of_family(split[1], self.varying)
        remember(self.families, split[0], plan)
        return True
