"""Schedule 'reverse_scan'."""

from maxghost.ghost.schedules.reverse_scan.walk import run

__all__ = ["run"]
