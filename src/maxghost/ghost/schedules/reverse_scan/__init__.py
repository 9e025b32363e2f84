"""Schedule 'reverse_scan': one backward walk over the stacked layers for validation and training."""

from maxghost.ghost.schedules.reverse_scan.walk import run as run
