"""A page to look at: is it working, what is dropped and why, what needs me."""

from oncebridge.dashboard.desk import Desk
from oncebridge.dashboard.server import Dashboard

__all__ = ["Dashboard", "Desk"]
