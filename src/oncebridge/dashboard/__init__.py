"""The dashboard: a web page with the state, the decisions and the dead letters of a service."""

from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.server import Dashboard
from oncebridge.engine.router import Router
from oncebridge.service.config import Setup
from oncebridge.service.monitor import Monitor
from oncebridge.stores.api import Store

__all__ = ["Dashboard", "Desk", "beside"]


def beside(setup: Setup, store: Store, router: Router, monitor: Monitor) -> Dashboard:
    """Return the dashboard of a service that runs in this process."""
    return Dashboard(setup, Desk(setup, store, router, monitor))
