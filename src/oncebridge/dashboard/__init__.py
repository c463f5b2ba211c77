"""The dashboard: a web page with the state, the decisions and the dead letters of a service."""

from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.server import Dashboard
from oncebridge.engine.router import Router
from oncebridge.service.config import Setup
from oncebridge.service.monitor import Monitor
from oncebridge.stores.api import Store

__all__ = ["Dashboard", "DashboardData", "make_dashboard"]


def make_dashboard(setup: Setup, store: Store, router: Router, monitor: Monitor) -> Dashboard:
    """Return the dashboard of a service that runs in this process."""
    return Dashboard(setup, DashboardData(setup, store, router, monitor))
