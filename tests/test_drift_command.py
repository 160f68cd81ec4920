"""`isobit drift`: what it prints and writes, its page, and what it says about a rollout or bad input."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from commands import Isobit, report
from isobit.cli.html import page
from isobit.drift import measure_rollout, read_rollouts
from isobit.drift.axes import alone
from isobit.drift.calls import Run
from isobit.frame.contract import ContractError
from row_by_row import V, made, sequences

BOS = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny config with weights."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_a_report_and_its_page(isobit: Isobit, checkpoint: str, tmp_path: Path) -> None:
    html, saved = tmp_path / "drift.html", tmp_path / "drift.json"
    few = ("--tokens", "30", "--length", "12", "--device", "cpu")
    done = isobit("drift", checkpoint, *few, "--html", str(html), "--json", str(saved))
    made = json.loads(saved.read_text())
    differ = any(row["metrics"]["differ"] for row in made["axes"])
    assert done.code == int(differ) and made["passed"] is not differ and made["tokens"] == 30
    assert (
        not made["random_weights"] and len(made["axes"]) == 8 and made["command"].startswith("isobit drift")
    )
    assert "LlamaForCausalLM, fp32 on cpu: 4 sequences, 30 tokens" in done.out
    table = [line for line in done.out.splitlines() if re.match(r"[a-z]+: .* \d+ of \d+  ", line)]
    assert len(table) == 8 and max(map(len, table)) <= 80
    assert "decode: static cache" in done.err  # progress
    text = html.read_text()
    assert "<h3>What differs</h3>" in text and "http" not in text.replace("https://github.com", "")
    # The same page from the file.
    assert page([made], "isobit drift") == text


def test_random_weights_are_said_and_json_goes_to_standard_output(isobit: Isobit, checkpoint: str) -> None:
    small = ("--vs", "packed,micro-batch", "--no-where", "--tokens", "20", "--length", "8", "--device", "cpu")
    done = isobit("drift", checkpoint, "--random", *small, "--json", "-")
    made = report(done)
    assert made["random_weights"] and made["dtype"] == "bf16" and "random" in " ".join(made["notes"])
    assert [row["axis"] for row in made["axes"]] == ["packed", "micro-batch", "micro-batch"]
    assert all(row["where"] is None for row in made["axes"])


def test_prompts_of_a_file(isobit: Isobit, checkpoint: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2, 3]\n\n[4, 5]\n")
    small = ("--vs", "length", "--device", "cpu", "--prompts", str(prompts))
    made = report(isobit("drift", checkpoint, *small, "--json", "-"))
    assert (made["sequences"], made["tokens"]) == (2, 5)
    mistakes = {
        "[1, 2]\nno\n": ":2: neither a list of ids", "": "no lines in it", '"text"\n': "no tokenizer",
        f"[1, {V}]\n": "outside the vocabulary",
    }  # fmt: skip
    for wrong, message in mistakes.items():
        prompts.write_text(wrong)
        done = isobit("drift", checkpoint, *small)
        assert done.code == 1 and message in done.err.splitlines()[-1], done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "MODEL nowhere: no such folder or config"),
        (("CHECKPOINT/config.json",), "a config has no weights; --random makes some"),
        (("CHECKPOINT", "--vs", "sideways"), "unknown axis 'sideways'; known: batch, padding"),
        (("CHECKPOINT", "--tokens", "-1"), "--tokens is 0, for all, or more"),
        (("CHECKPOINT", "--rollout", "nothing.jsonl"), "cannot be read"),
        (("CHECKPOINT", "--rollout", "x", "--vs", "batch"), "no --prompts and no --vs"),
        (("CHECKPOINT", "--html", "nowhere/x.html"), "no folder nowhere"),
    ],
)
def test_bad_arguments_are_one_line(
    isobit: Isobit, checkpoint: str, arguments: tuple[str, ...], message: str
) -> None:
    done = isobit("drift", *(a.replace("CHECKPOINT", checkpoint) for a in arguments), "--device", "cpu")
    assert done.code == 1 and message in done.err.splitlines()[-1] and "Traceback" not in done.err


# Rollouts


MODEL = made(bos_token_id=BOS)


def lines(
    temperature: float = 1.0, model: Any = MODEL, bos: bool = False, shift: int = 0
) -> list[dict[str, Any]]:
    """A rollout as an engine with some mistake would write it."""
    rows = []
    for ids in sequences((12, 16, 10)):
        ids = ids.clamp(min=2)
        given = torch.cat((torch.tensor([BOS]), ids)) if bos else ids
        (logps,) = Run(model, torch.device("cpu")).logps(alone([given]), [given], temperature)
        outputs = logps[len(logps) - 6 - shift : len(logps) - shift]
        rows.append({
            "prompt_ids": ids[:-6].tolist(), "output_ids": ids[-6:].tolist(), "logprobs": outputs.tolist(),
            "logprob_bits": [struct.pack(">f", x).hex() for x in outputs.tolist()],
            "engine": "vllm", "version": "0.26.0", "options": {"temperature": temperature},
        })  # fmt: skip
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_rollout_of_the_same_model_is_equal(tmp_path: Path) -> None:
    found = measure_rollout(MODEL, write(tmp_path / "rollout.jsonl", lines()))
    assert found.differ == 0 and not found.causes and found.tokens == 18
    assert [(row.axis, row.setting) for row in found.rows] == [("rollout", "vllm 0.26.0")]


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"temperature": 0.65}, "temperature 0.65"),  # it is in the options
        ({"bos": True}, "BOS is missing"),
        ({"shift": 1}, "shifted by one: each belongs to the token before it"),
    ],
)
def test_a_mistake_is_named_before_anything_else(tmp_path: Path, mistake: Any, cause: str) -> None:
    found = measure_rollout(MODEL, write(tmp_path / "rollout.jsonl", lines(**mistake)))
    assert len(found.causes) == 1 and cause in found.causes[0] and cause in str(found)
    with_it, without = found.rows
    assert with_it.differ and without.differ == 0


def test_other_weights_are_named(tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = made(layers=1)
    found = measure_rollout(MODEL, write(tmp_path / "rollout.jsonl", lines(model=other)))
    assert len(found.rows) == 1 and "of another model" in found.causes[0]


def test_a_small_difference_has_no_cause(tmp_path: Path) -> None:
    rows = lines()
    for row in rows:
        row["logprobs"] = [x - 1e-3 for x in row["logprobs"]]
        del row["logprob_bits"]
    found = measure_rollout(MODEL, write(tmp_path / "rollout.jsonl", rows))
    assert found.differ == 18 and not found.causes and abs(found.rows[0].metrics["kl"] + 1e-3) < 1e-6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", ":1: not JSON"),
        ("[1]", "not an object"),
        ('{"prompt_ids": [1], "output_ids": [2]}', "logprobs missing"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1, -2]}', "2 logprobs for 1 output_ids"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [0.5]}', "0.5 is not a log-probability"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [NaN]}', "nan is not a log-probability"),
        ('{"prompt_ids": ["a"], "output_ids": [2], "logprobs": [-1]}', "lists of integers"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1], "logprob_bits": ["x"]}', "hexadecimal"),
        ('{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1], "logprob_bits": ["c0000000"]}',
         "not those"),
        ("", "no lines in it"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_rollout(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ContractError, match=message):
        read_rollouts(path)


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "output_ids": [V], "logprobs": [-1.0]}]
    with pytest.raises(ContractError, match="outside the vocabulary"):
        measure_rollout(MODEL, write(tmp_path / "rollout.jsonl", rows))


def test_the_command_compares_a_rollout(isobit: Isobit, checkpoint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rollout.jsonl", lines())  # of another model
    html = tmp_path / "page.html"
    done = isobit("drift", checkpoint, "--rollout", str(path), "--device", "cpu", "--html", str(html))
    assert done.code == 1 and "rollout: vllm 0.26.0" in done.out
    assert "of another model" in done.out and "of another model" in html.read_text()
