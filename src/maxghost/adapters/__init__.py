"""Adapters: small trained parts on frozen layers of a model. `create` makes the model of a run, with or without any."""

from maxghost.adapters.attach import attach, create, create_abstract, disabled
from maxghost.adapters.lora import Lora

__all__ = ["Lora", "attach", "create", "create_abstract", "disabled"]
