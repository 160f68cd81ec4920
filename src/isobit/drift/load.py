"""Models and prompts that the command line names."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from isobit.frame.contract import ContractError


def load_model(name: str, random: bool, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A causal LM of transformers: from a checkpoint's folder, or with random weights from its config. `name`
    may also be that of a checkpoint of the Hugging Face Hub, `owner/name`."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise ContractError("isobit drift needs transformers: pip install transformers") from None
    path = Path(name)
    if not path.exists() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ContractError(f"MODEL {name}: no such folder or config")
    if path.is_file() and not random:
        raise ContractError(f"MODEL {name}: a config has no weights; --random makes some")
    try:
        if not random:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
        else:
            config = transformers.AutoConfig.from_pretrained(name)
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    except (OSError, ValueError, KeyError) as error:
        has_config = path.joinpath("config.json").is_file() and not random
        more = "; --random makes weights, from the config alone" if has_config else ""
        raise ContractError(f"MODEL {name}: {str(error).splitlines()[0].rstrip('.')}{more}") from None
    return model.to(device).eval()


def read_prompts(path: Path, model: str) -> list[list[int]]:
    """One sequence a line, as JSON: a list of ids, or a string for the model's tokenizer."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"--prompts {path}: cannot be read ({error})") from None
    if not lines:
        raise ContractError(f"--prompts {path}: no lines in it")
    tokenizer = None
    prompts = []
    for n, line in enumerate(lines, 1):
        try:
            given = json.loads(line)
        except ValueError:
            given = None
        if isinstance(given, str):
            tokenizer = tokenizer or _tokenizer(model)
            given = tokenizer(given)["input_ids"]
        if not isinstance(given, list) or not all(type(i) is int for i in given):
            raise ContractError(f'{path}:{n}: neither a list of ids, [5, 7], nor a string, "Why?", in JSON')
        prompts.append(given)
    return prompts


def _tokenizer(model: str) -> Any:
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise ContractError(f"--prompts has text, and {model} no tokenizer ({why})") from None
