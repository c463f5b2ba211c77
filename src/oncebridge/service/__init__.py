"""
The service: its configuration, and sources, routes and a store that run together.

Loaded when asked for: the Lambda handler and the command line read a configuration without
running a service.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncebridge.service.service import Service as Service
    from oncebridge.service.service import gateways as gateways
    from oncebridge.service.service import make_router as make_router

__all__ = ["Service", "gateways", "make_router"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oncebridge.service import service  # noqa: PLC0415 - see above

    return getattr(service, name)
