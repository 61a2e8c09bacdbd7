"""`fairseq-icl fetch data` and `fairseq-icl fetch model`: bring datasets and models here, resumed after a cut, checked.

    fairseq-icl fetch data --to DATA                         the papers' six datasets
    fairseq-icl fetch data sst2 boolq --to DATA              others of the catalogue, or a YAML file of your own
    fairseq-icl fetch data --by-hand --to DATA               what to download and where to put it, without network
    fairseq-icl fetch model 125m                             one of fairseq's archives, to where model=125m looks for it
    fairseq-icl fetch model facebook/opt-125m --to opt       a model of the hub; then: model=opt

Without network, or without this command: the files' addresses are in the datasets' and models' YAML files.
"""

import argparse
import os
from pathlib import Path

from fairseq_icl.errors import UserError
from fairseq_icl.fetching import split_name
from fairseq_icl.fetching.data import fetch_dataset, places
from fairseq_icl.prompts.catalogue import dataset_names, find_spec, load_spec
from fairseq_icl.results import text_table


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(prog="fairseq-icl fetch", description=__doc__, formatter_class=formatter)
    what = result.add_subparsers(dest="what", metavar="data | model", required=True)
    data = what.add_parser("data", help="datasets of the catalogue, from the Hugging Face hub")
    data.add_argument(
        "names", nargs="*", metavar="NAME", help="dataset, or path of its YAML (default: the papers' six)"
    )
    data.add_argument("--all", action="store_true", help="the whole catalogue")
    data.add_argument("--to", type=Path, metavar="DATA", required=True, help="folder that data=DATA will name")
    data.add_argument("--by-hand", action="store_true", help="only print what to download and where to put it")
    data.add_argument("--any-rows", action="store_true", help="keep rows that are not, row for row, the papers'")
    data.add_argument("--quiet", action="store_true", help="no progress")
    model = what.add_parser("model", help="a model of the hub, or one of fairseq's archives")
    model.add_argument(
        "name", metavar="NAME", help="OWNER/NAME[@REVISION] on the hub; 125m, xglm_564m ...; a YAML file"
    )
    model.add_argument("--to", type=Path, metavar="DIR", help="its folder (default: where replicate looks for it)")
    model.add_argument("--no-continuation", action="store_true", help="the doctor need not load the weights")
    model.add_argument("--quiet", action="store_true", help="no progress")
    return result


def main(argv: list[str]) -> int:
    """Bring datasets, with a line for each file, or a model; the exit code."""
    arguments = parser().parse_args(argv)
    if arguments.what == "model":
        return fetch_model(arguments)
    if arguments.all and arguments.names:
        raise UserError("--all: brings the whole catalogue; leave out the names")
    names = arguments.names or [name for name in dataset_names() if arguments.all or load_spec(name).papers]
    specs = [find_spec(name, arguments.to) for name in names]
    if arguments.by_hand:
        lines = [(str(place), url) for spec in specs for url, place in places(spec, arguments.to).values()]
        print(text_table([("put it at", "download"), *lines]))
        return 0
    for spec in specs:
        for line in fetch_dataset(spec, arguments.to, any_rows=arguments.any_rows, quiet=arguments.quiet):
            print(line, flush=True)
    return 0


def fetch_model(arguments: argparse.Namespace) -> int:
    """Bring a model and have the doctor look at it, whose exit code is the command's."""
    from fairseq_icl.commands import doctor  # slow to import
    from fairseq_icl.fetching.models import fetch_archive, fetch_hub_model
    from fairseq_icl.replication.configuration import FOLDER, MODEL_FILE, compose_configuration, friendly

    name: str = arguments.name
    if (FOLDER / "model" / f"{name}.yaml").is_file() or name.endswith(MODEL_FILE):
        model = compose_configuration(friendly([f"model={name}", "data=."]))["model"]
        if not model["archive"]:
            raise UserError(f"model {name}: its YAML names no archive; give OWNER/NAME for a model of the hub")
        folder = arguments.to or Path(model["path"]).parent
        line = fetch_archive(model, folder, quiet=arguments.quiet)
    else:
        folder = arguments.to or Path(os.environ.get("FAIRSEQ_ICL_MODELS", "models"), Path(split_name(name)[0]).name)
        line = fetch_hub_model(name, folder, quiet=arguments.quiet)
    print(line, flush=True)
    return doctor.main([str(folder), *["--no-continuation"] * arguments.no_continuation])
