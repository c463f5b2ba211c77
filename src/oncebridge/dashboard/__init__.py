"""A page to look at: is it working, what is dropped and why, what needs me."""

from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.server import Dashboard

__all__ = ["Dashboard", "Desk"]
