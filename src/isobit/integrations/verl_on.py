"""Enables isobit inside verl when it is imported. For verl's configuration, which names modules that its
worker processes import.

    actor_rollout_ref.model.external_lib=isobit.integrations.verl_on
"""

from isobit.integrations import verl

verl.enable()
