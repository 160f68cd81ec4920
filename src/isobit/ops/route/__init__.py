from isobit.ops.route.op import Routing, choose_experts, expert_rows, route

__all__ = ["Routing", "choose_experts", "expert_rows", "route"]
