"""
The service: its configuration, and sources, routes and a store that run together.

Loaded when asked for: the Lambda handler and the command line read a configuration without
running a service.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncebridge.service.routes import gateways as gateways
    from oncebridge.service.routes import make_router as make_router
    from oncebridge.service.service import Service as Service

__all__ = ["Service", "gateways", "make_router"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "service" if name == "Service" else "routes"
    return getattr(import_module(f"{__name__}.{module}"), name)
