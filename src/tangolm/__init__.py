"""tangolm: the TANGO language models (arXiv:2608.22117) and the laboratory that trains, measures and compares them.

config = tangolm.preset("tango-70m-d4", vocab_size=257, context=256)
model = tangolm.build_model(config, seed=17)
loss = model(input_ids, labels=input_ids).loss

The names are imported when they are first asked for: preparing data needs no torch, and each of its processes would hold it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tangolm import ops as ops
    from tangolm.models import TangoLayer as TangoLayer
    from tangolm.models import build_model as build_model
    from tangolm.models import load_model as load_model
    from tangolm.models import preset as preset
    from tangolm.models import preset_names as preset_names
    from tangolm.models import save_model as save_model

__version__ = "0.1.0"

_OF_MODELS = ("TangoLayer", "build_model", "load_model", "preset", "preset_names", "save_model")


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("tangolm.ops")
    if name not in _OF_MODELS:
        raise AttributeError(f"module 'tangolm' has no attribute {name!r}")
    return getattr(import_module("tangolm.models"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), "ops", *_OF_MODELS])
