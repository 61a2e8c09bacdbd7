"""Experiment configuration -> the cells to run, in a fixed order, grouped so that neighbours share model and data."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.catalogue import DatasetSpec, load_spec, source_of
from fairseq_icl.prompts.sampling import NUM_PERMUTATIONS
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.configuration import GRID, MAX_SCALE, NO_TRAINING
from fairseq_icl.replication.find_model import MAX_NAME, find_model, shape_of
from fairseq_icl.results import text_table
from fairseq_icl.settings import OF_TRAINING, READING, SETTINGS, Settings, check_reading, equal_step_size, nearest
from fairseq_icl.training.methods import check_precision_of, get_method

VARIABLE = (*(name for name in SETTINGS if name not in GRID), "reading", "lr_scale")
"""Settings that a variant may change."""
SKIP_KEYS = ("init", "method", "dataset", "variant", "not_variant")
PAPER_KEYS = ("k", "seeds", "permutations", "learning_rate")
MADE_FOR = {"dai2023": "1.3b", "deutch2024": "1.3b", "demo": "demo"}
"""Papers whose settings the shipped datasets have, and the model that their learning rates were made for."""


@dataclass(frozen=True)
class Facts:
    """What a paper (or the user) says about one dataset."""

    num_demonstrations: int
    runs: Sequence[tuple[int, int]]  # (seed, permutation) of each run
    learning_rate: float | Mapping[str, float] | None
    made_for: str = ""  # the model that the learning rate was made for, where it is another one than the run's


def expand(config: Mapping[str, Any]) -> list[Cell]:
    """All cells of a run. `config` is the composed configuration as plain containers."""
    methods, inits, names = (_words(config[key], key) for key in ("method", "init", "datasets"))
    for method in methods:
        get_method(method)
    inits = [NO_TRAINING[config["reading"]] if init == "no-training" else init for init in inits]
    if not names:
        raise UserError("dataset=[]: no dataset to run; name some, e.g. dataset=[sst2,mr]")
    variants, rules = _variants(config), [_rule(rule) for rule in config["skip"]]
    several = {name: config[name] for name in SETTINGS if name not in GRID and isinstance(config[name], list)}
    for name in (name for name in several if name in config["vary"]):
        again = f"vary.{name}={several[name]}"
        raise UserError(f"{name}={several[name]}: the experiment varies it already; give {again}")
    cells: dict[Cell, None] = {}
    specs: dict[str, DatasetSpec] = {}
    for init, given, values in itertools.product(inits, names, itertools.product(*several.values())):
        chosen = {**config, **dict(zip(several, values, strict=True)), "init": init}
        source = source_of(given, Path(config["data"]))
        spec = load_spec(source)
        facts, name = _facts(spec, chosen), spec.name
        if specs.setdefault(name, spec).fingerprint != spec.fingerprint:
            raise UserError(f"dataset={given}: another dataset of this run is also named {name}; give one another name")
        for (seed, permutation), (variant, changes), method in itertools.product(facts.runs, variants.items(), methods):
            identity = {"init": init, "method": method, "dataset": name, "variant": variant, "not_variant": variant}
            if any(
                all((identity[key] in words) != key.startswith("not_") for key, words in rule.items()) for rule in rules
            ):
                continue
            changed = {**chosen, **changes, "seed": seed, "permutation": permutation}
            rates, lender = _learning_rates(changed, facts, method)
            settings = _settings(changed, facts, method, rates)
            different = tuple(rates.items()) if len(set(rates.values())) > 1 else ()
            cells[Cell(config["model"]["name"], name, method, variant, settings, source, different, lender)] = None
    if not cells:
        raise UserError("the plan is empty: `skip`, or plain=false, leaves nothing of the chosen settings")
    papers = {*MADE_FOR, *(paper for spec in specs.values() for paper in spec.papers)}  # the user's may know others
    if config["paper"] not in papers:
        raise UserError(f"paper={config['paper']}: unknown paper; {nearest(config['paper'], papers)}")
    by_model: dict[Settings, list[Cell]] = {}
    for cell in cells:
        by_model.setdefault(cell.model_key(), []).append(cell)
    # Those of one model follow each other: a seed's random weights are drawn once, not once for every dataset.
    return [cell for group in by_model.values() for cell in group]


def _words(value: Any, key: str) -> list[str]:
    words = [value] if isinstance(value, str) else list(value or [])
    if not words and key != "datasets":
        raise UserError(f"{key}=[]: give at least one")
    if not all(isinstance(word, str) and word.strip() and word.isprintable() for word in words):
        raise UserError(f"{key}={str(value)[:80]}: expected a name or a list of names")
    if any(len(part.encode()) >= MAX_NAME - len(".yaml") for word in words for part in word.split("/")):
        raise UserError(f"{key}={str(value)[:80]}: too long for a name")
    return list(dict.fromkeys(words))


def _variants(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Variant name -> the settings it changes, the plain run ("") first."""
    variants: dict[str, dict[str, Any]] = {"": {}} if config["plain"] else {}
    if config["audit"]:
        differences = [(name, value) for name, known in READING.items() for value in known.choices]
        variants |= {f"{name}={value}": {name: value} for name, value in differences if value != SETTINGS[name].default}
        variants["reading=paper"] = {"reading": "paper"}
    for name, changes in config["variants"].items():
        if not isinstance(changes, Mapping):
            raise UserError(f"variants.{name}={changes}: must be a mapping of settings, e.g. {{lr_scale: 0.1}}")
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise UserError(f"variants.{str(name).strip()}: the name must be a text in one line; quote numbers")
        variants[name] = dict(changes)
    vary = {key: _as_list(value) for key, value in config["vary"].items()}
    if vary.get("layers") == ["each"]:
        shape = shape_of(config["model"], find_model(config["model"], Path(config["out"]), make=False))
        vary["layers"] = [str(layer) for layer in range(shape["layers"])]
    for key, values in vary.items():
        if not values:
            raise UserError(f"vary.{key}=[]: give at least one value")
    for values in itertools.product(*vary.values()) if vary else ():
        changes = dict(zip(vary, values, strict=True))
        texts = (f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in changes.items())
        variants[" ".join(texts)] = changes
    for name, changes in variants.items():
        for key, value in changes.items():
            if key not in VARIABLE:
                raise UserError(f"variant {name[:80]}: {key} cannot be varied; {nearest(key, VARIABLE)}")
            if key in SETTINGS and value is not None:
                SETTINGS[key].check(value)
            elif key == "reading":
                check_reading(value)
            elif key == "lr_scale" and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SCALE
            ):
                raise UserError(f"lr_scale={str(value)[:80]}: must be a number of at least 0")
    return variants


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _rule(rule: Any) -> dict[str, list[str]]:
    if not isinstance(rule, Mapping):
        raise UserError(f"skip: {rule} is no mapping; write a list of mappings such as {{method: [gd]}}")
    for key, value in rule.items():
        if key not in SKIP_KEYS:
            raise UserError(f"skip: unknown key {key}; use {', '.join(SKIP_KEYS)}")
        if not all(isinstance(word, str | int | float) for word in _as_list(value)):
            raise UserError(f"skip: {key}={str(value)[:80]}: must be a name or a list of names")
    return {key: [str(word) for word in _as_list(value)] for key, value in rule.items()}


def _facts(spec: DatasetSpec, config: Mapping[str, Any]) -> Facts:
    """k, runs and learning rate: the command line's, else the paper's for this model, else the paper's."""
    by_model = config["published_settings"] or {}
    for model, by_dataset in by_model.items():
        if not isinstance(by_dataset, Mapping):
            raise UserError(f"published_settings.{model}: must be a mapping from datasets to settings")
    name = config["model"]["name"]
    lender = next(iter(by_model), MADE_FOR.get(config["paper"], "")) if name not in by_model else name
    published = _published(spec.papers.get(config["paper"], {}), f"{spec.name}: papers.{config['paper']}")
    published |= _published(by_model.get(lender, {}).get(spec.name, {}), f"published_settings, {spec.name}")
    k = published.get("k") if config["num_demonstrations"] is None else config["num_demonstrations"]
    varied = {*config["vary"], *(key for changes in config["variants"].values() for key in changes)}
    if k is None and "num_demonstrations" not in varied:
        raise UserError(f"{spec.name}: no number of demonstrations in {config['paper']}; give num_demonstrations=K")
    seeds = [SETTINGS["seed"].check(seed) for seed in _as_list(published.get("seeds", []))]
    tied = dict(zip(seeds, published.get("permutations", []), strict=False))  # a seed's permutation in the paper
    chosen = config["seed"]
    if chosen is None or chosen == "first":
        if not seeds:
            raise UserError(f"{spec.name}: no seeds in {config['paper']}; give seed=[1,2,3]")
        chosen = seeds[:1] if chosen == "first" else seeds
    runs: list[tuple[int, int]] = []
    for number, seed in enumerate(dict.fromkeys(_as_list(chosen))):
        free = number % NUM_PERMUTATIONS if len(set(tied.values())) > 1 else 0
        permutations = tied.get(seed, free) if config["permutation"] is None else config["permutation"]
        runs += [(seed, permutation) for permutation in _as_list(permutations)]
    rates = config["model"]["learning_rates"]
    if not rates:
        is_own = name in (lender, f"en_dense_lm_{lender}")
        return Facts(k or 0, runs, published.get("learning_rate"), "" if is_own else lender)
    if spec.name not in rates:
        raise UserError(f"model.learning_rates: no rate for {spec.name}; give lr=RATE, or add experiment=rate_search's")
    rate = rates[spec.name]
    for one in rate.values() if isinstance(rate, Mapping) else [rate]:
        SETTINGS["lr"].check(one)
    return Facts(k or 0, runs, rate)


def _published(settings: Any, source: str) -> dict[str, Any]:
    """What a paper says of a dataset, checked."""
    if not isinstance(settings, Mapping):
        raise UserError(f"{source}: must be a mapping of {', '.join(PAPER_KEYS)}")
    checks = dict(zip(PAPER_KEYS, ("num_demonstrations", "seed", "permutation", "lr"), strict=True))
    for key, value in settings.items():
        if key not in checks:
            raise UserError(f"{source}: unknown key {key}; {nearest(key, PAPER_KEYS)}")
        listed = list(value.values()) if key == "learning_rate" and isinstance(value, Mapping) else _as_list(value)
        if key in ("seeds", "permutations") and not isinstance(value, list | tuple):
            raise UserError(f"{source}: {key} must be a list")
        for single in [value] if key == "k" else listed:
            if single is not None:
                SETTINGS[checks[key]].check(single)
    return dict(settings)


def _settings(config: Mapping[str, Any], facts: Facts, method: str, rates: Mapping[str, float]) -> Settings:
    """The settings of one cell: the configuration with a variant's changes already put over it."""
    given = {name: config[name] for name in SETTINGS}
    if config["device"] is None:  # part of the keys: CPU and GPU round differently
        given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if config["num_demonstrations"] is None:  # every variant may bring its own k; facts give the paper's
        given["num_demonstrations"] = facts.num_demonstrations
    if get_method(method).trained:
        given["lr"] = next(iter(rates.values())) if len(set(rates.values())) == 1 else None
    else:  # what only training reads is left at its default, so that such cells are the same cell
        given |= dict.fromkeys(OF_TRAINING)
    settings = Settings.of(config["reading"], **given | get_method(method).settings)
    for name in get_method(method).trained:  # what fine-tuning would refuse once the model is loaded is refused now
        if settings.num_demonstrations == 0:
            raise UserError(f"num_demonstrations=0: method {method} has nothing to train on; use method=none")
        if (settings.layer_clip == "none") != (settings.layer_clip_value is None):
            if settings.layer_clip == "none":
                raise UserError("layer_clip_value: needs layer_clip=norm or max")
            value = "layer_clip_value (a value, one per layer, a method)"
            raise UserError(f"layer_clip={settings.layer_clip}: needs {value}")
        equal_step_size(settings)
        check_precision_of(get_method(name), settings)
    return settings


def _learning_rates(config: Mapping[str, Any], facts: Facts, method: str) -> tuple[dict[str, float], str]:
    """The rate of every method that the cell trains by, and the model that one was made for if it is another one."""
    rates, lenders = {}, [""]
    for name in get_method(method).trained:
        known, published, lender = get_method(name), facts.learning_rate, ""
        if not known.reads(SETTINGS["lr"]):
            continue
        rate = known.settings.get("lr", config["lr"])  # what the user says
        if rate is None:  # what model or paper say of this method, else the method's own, else the paper's
            rate = published.get(name) if isinstance(published, Mapping) else published if known.lr is None else None
            rate, lender = (known.lr, "") if rate is None else (rate, facts.made_for)
        if rate is None:
            source = "model.learning_rates" if config["model"]["learning_rates"] else config["paper"]
            raise UserError(f"no learning rate for method {name} in {source}; give lr=RATE")
        rates[name] = float(SETTINGS["lr"].check(rate)) * config["lr_scale"]
        lenders.append(lender)
    return rates, max(lenders)


def borrowed_rates(cells: Sequence[Cell]) -> list[str]:
    """A line for every dataset whose learning rate was made for another model."""
    known = dict.fromkeys((cell.dataset, cell.model, cell.lender) for cell in cells)
    return [borrowed_rate(*names) for names in known if names[-1]]


def borrowed_rate(dataset: str, model: str, lender: str) -> str:
    """What is said where a learning rate is not the model's own."""
    remedy = "experiment=rate_search finds it, lr=RATE gives it"
    return f"{dataset}: the learning rate is the paper's for {lender}, not one for {model}; {remedy}"


def counted(cells: Sequence[Cell], todo: Sequence[Cell]) -> str:
    """Cells by all that differs between them, learning rate and k always; and how many of them are still to do."""
    changed = {cell: cell.changed_settings() for cell in cells}
    values = {cell: vars(cell.settings) | changed[cell] for cell in cells}
    varied = {name for given in changed.values() for name in given} - {*GRID, "num_demonstrations", "lr"}
    names = ["num_demonstrations", "lr"]
    names += sorted(name for name in varied if len({str(given[name]) for given in values.values()}) > 1)

    def row_of(cell: Cell) -> tuple[str, ...]:
        texts = ("" if values[cell][name] is None else str(values[cell][name]) for name in names)
        return cell.settings.init, cell.dataset, cell.method, *texts

    planned, left = Counter(map(row_of, cells)), Counter(map(row_of, todo))
    rows: list[tuple[Any, ...]] = [("init", "dataset", "method", *names, "cells", "to do")]
    rows += [(*which, count, left[which]) for which, count in planned.items()]
    rows += [("", "", "all", *([""] * len(names)), len(cells), len(todo))]
    return text_table(rows, names=3 + len(names))
