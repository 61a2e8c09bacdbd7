"""Does a language model learn in context the way gradient descent would teach it?

    import fairseq_icl as fi

    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=32, seed=1, limit=60)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, method="lcgd", lr=1.0) as tuned:
        ft = fi.observe(tuned, prompts)
    table = fi.compare(prompts, zsl, icl, ft)
    fi.plot_layers(table, "sim_aou", "sim_aou.png")

Importing the package imports nothing else, changes nothing and takes no time: the names below are loaded when they are
first used. As a plugin (`fairseq-train --user-dir fairseq_icl`) fairseq imports `tasks/` and `models/` by itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairseq_icl.api import build_prompts, compare, fine_tuned, load_model, observe, plot_layers
    from fairseq_icl.errors import UserError
    from fairseq_icl.models import Model
    from fairseq_icl.observing.activations import Activations
    from fairseq_icl.observing.observation import Observation
    from fairseq_icl.prompts.build import Prompts
    from fairseq_icl.replication.report.run import read_run
    from fairseq_icl.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "Model",
    "Observation",
    "Prompts",
    "Settings",
    "UserError",
    "build_prompts",
    "compare",
    "fine_tuned",
    "load_model",
    "observe",
    "plot_layers",
    "read_run",
]

_PLACES = {
    "Activations": "observing.activations",
    "Model": "models",
    "Observation": "observing.observation",
    "Prompts": "prompts.build",
    "Settings": "settings",
    "UserError": "errors",
    "read_run": "replication.report.run",
}
"""Where a public name is defined, if not in `api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
