"""Vision role: turns images into rows that prefill and decode take as input.

Nothing is here yet. The role arrives together with the model's vision tower; until then a
deployment has zero vision replicas and the router refuses requests that carry images.

The room exists already because its place in the order of imports is fixed: it may import
``core``, ``model`` and ``kvstore``, and neither ``engine`` nor the other roles.
"""

__all__: list[str] = []
