"""Any decoder-only model that transformers knows, by its own code: `load_folder` makes a `TransformersDecoder` of it.

The library is imported when such a folder is opened, and never before. No code of a folder is run, nothing is fetched.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face.weights import MASKS
from fairseq_icl.models.transformers_lm.attention import register
from fairseq_icl.models.transformers_lm.decoder import TransformersDecoder
from fairseq_icl.models.transformers_lm.examination import examine, first_tokens, positions_of

__all__ = ["TransformersDecoder", "adapted", "import_transformers", "load_folder", "positions_of", "read_config"]

EXTRA = "pip install 'fairseq-icl[hf]'"


def import_transformers(wanted_by: str | Path = "this") -> Any:
    """The library, or how to get it."""
    try:
        import transformers
        import transformers.utils
    except ImportError as error:
        raise UserError(f"{wanted_by}: a model of this family needs transformers; {EXTRA}") from error
    # Where fairseq's torchaudio is not made for the installed torch, transformers fails on it; no model needs it.
    transformers.utils.is_torchaudio_available = lambda: False
    transformers.utils.logging.disable_progress_bar()
    register(transformers)
    return transformers


def read_config(folder: Path) -> Any:
    """What config.json says, by the library's own class for it."""
    transformers = import_transformers(folder)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, for many reasons
        raise _refusal(folder, error) from error


def load_folder(
    folder: Path,
    dictionary: Dictionary,
    init: str = "pretrained",
    final_norm: str = "kept",
    seed: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TransformersDecoder:
    """The decoder in a folder; `init`, `final_norm` and `seed` as in `models.pretrained_lm.load_decoder`."""
    config = read_config(folder)
    model = _untrained(folder, config, seed) if init == "untrained" else _pretrained(folder, config, dtype, device)
    decoder = adapted(model.eval().requires_grad_(False), dictionary, str(folder))
    decoder.requires_grad_(True)
    if init in ("layer-norms", "trained-embeddings"):
        kept = norms_of_layers(decoder) | (
            {"embed_tokens", "output_projection", "body"} if init == "trained-embeddings" else set()
        )
        _forget(decoder, model, kept | {"layer_norm"}, seed)
        if final_norm == "lost":
            decoder.lose_final_norm()
    return decoder


def adapted(model: Any, dictionary: Dictionary, name: str) -> TransformersDecoder:
    """A causal language model of transformers, which must be eager, as a decoder; the model itself is used up."""
    for owner in list(model.modules()):
        for part, child in list(owner._modules.items()):
            if type(child).__name__ == "Conv1D":
                owner._modules[part] = _as_linear(child)
    model.set_experts_implementation(
        "eager"
    )  # the others have no forward derivative; models without experts do not care
    tokens = first_tokens(model.config.get_text_config().vocab_size).to(model.device)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        decoder = TransformersDecoder(model, dictionary, examine(model, name))
        found = decoder(tokens)[0]
    tolerance = 1e-4 if found.dtype in (torch.float32, torch.float64) else 3e-2
    if not torch.allclose(found, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max()))):
        raise UserError(f"{name}: the model runs otherwise here than in transformers; use a model of another family")
    return decoder


def _as_linear(conv: Any) -> nn.Linear:
    """GPT-2's Conv1D stores (inputs, outputs)."""
    linear = nn.Linear(1, 1)
    linear.in_features, linear.out_features = conv.weight.shape
    linear.weight, linear.bias = nn.Parameter(conv.weight.detach().t().contiguous()), conv.bias
    return linear


def _untrained(folder: Path, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return import_transformers(folder).AutoModelForCausalLM.from_config(_still(config), attn_implementation="eager")


def _pretrained(folder: Path, config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    transformers = import_transformers(folder)
    place = {"device_map": {"": str(device)}} if torch.device(device).type == "cuda" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=_still(config), dtype=dtype, attn_implementation="eager",
                local_files_only=True, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
                **place,
            )  # fmt: skip
    except Exception as error:
        raise _refusal(folder, error) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(str(key) for key in info.get(problem, ()) if not re.fullmatch(MASKS, str(key)))
        if found:
            what = f"{problem.replace('_', ' ')}: {found[0][:120]}"
            raise UserError(f"{folder}: its weights do not fit its config.json ({what}); use files of one model")
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter) if parameter.numel() else (torch.zeros(()), torch.zeros(()))
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{folder}: {name} holds NaN or infinite weights; get a sound copy of the model")
    return model


def _still(config: Any) -> Any:
    """The configuration without dropout or noise of any kind: both are off in everything this package runs."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in vars(part).items():
            if ("drop" in key or "jitter" in key) and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def norms_of_layers(decoder: TransformersDecoder) -> set[str]:
    """Names of the norms of the layers, without those of queries and keys."""
    names = set()
    for name, module in decoder.layers.named_modules(prefix="layers"):
        vectors = all(parameter.dim() == 1 for parameter in module.parameters(recurse=False))
        own = any(True for _ in module.parameters(recurse=False))
        if own and vectors and ".self_attn." not in name:
            names.add(name)
    return names


def _forget(decoder: TransformersDecoder, model: Any, kept: set[str], seed: int) -> None:
    """Draw all weights anew but those of the modules `kept`, by the family's own rule of initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in decoder.named_modules():
            if not any(name == one or name.startswith(f"{one}.") for one in kept):
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = False
                model._init_weights(module)


def _refusal(folder: Path, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    reason = " ".join(str(error).split())[:200]
    if "trust_remote_code" in str(error):
        return UserError(f"{folder}: the folder brings its own code, which is not run; use a model of a known family")
    return UserError(f"{folder}: transformers cannot read it ({reason}); download it again, or use another model")
