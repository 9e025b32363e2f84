"""Schedule 'reverse_scan': one walk back over the stacked layers, validation and training together."""

from maxghost.ghost.schedules.reverse_scan.walk import run

__all__ = ["run"]
