"""Schedule 'reverse_scan'."""

from maxghost.ghost.schedules.reverse_scan.walk import Account, run

__all__ = ["Account", "run"]
