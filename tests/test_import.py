"""`import fairseq_icl` costs nothing and changes nothing; its names come when they are used."""

import json
import subprocess
import sys

import fairseq_icl

LOOK = """
import json, logging, sys, warnings
levels = lambda: {name: logging.getLogger(name).level for name in (None, "fairseq", "fairseq.tasks.text_to_speech")}
before, hook, warned, handlers = levels(), sys.excepthook, warnings.filters[:], logging.root.handlers[:]
import fairseq_icl
%s
print(json.dumps({
    "loaded": sorted({name.partition(".")[0] for name in sys.modules}),
    "modules": sorted(name for name in sys.modules if name.startswith("fairseq_icl")),
    "excepthook": sys.excepthook is hook is sys.__excepthook__,
    "logging": levels() == before and logging.root.handlers == handlers,
    "warnings": warnings.filters == warned,
}))
"""


def after_import(then: str = "") -> dict:
    """What a fresh interpreter looks like after the import and `then`."""
    done = subprocess.run([sys.executable, "-c", LOOK % then], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_fresh_import_loads_no_library_and_changes_nothing():
    seen = after_import()
    assert not {"torch", "fairseq", "numpy", "pandas", "matplotlib", "hydra", "omegaconf", "yaml"} & set(seen["loaded"])
    assert seen["modules"] == ["fairseq_icl"]
    assert seen["excepthook"]
    assert seen["logging"]
    assert seen["warnings"]


def test_settings_and_errors_come_without_torch():
    seen = after_import("fairseq_icl.Settings(seed=3); fairseq_icl.UserError")
    assert not {"torch", "fairseq", "numpy"} & set(seen["loaded"])


def test_prompts_come_without_torch_or_fairseq():
    seen = after_import("fairseq_icl.Prompts")
    assert not {"torch", "fairseq"} & set(seen["loaded"])


def test_every_public_name_is_there_and_listed():
    assert set(fairseq_icl.__all__) <= set(dir(fairseq_icl))
    for name in fairseq_icl.__all__:
        assert getattr(fairseq_icl, name).__name__ == name
        assert getattr(fairseq_icl, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(fairseq_icl, "observ")
    assert "observ" not in dir(fairseq_icl)
