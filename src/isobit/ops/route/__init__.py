from isobit.ops.route.op import Routing, expert_rows, route

__all__ = ["Routing", "expert_rows", "route"]
